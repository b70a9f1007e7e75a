//! The draft vocabulary: the tokens a head can draft.

/// Some of the target's token ids, ascending; a draft index is a place in that list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftVocab {
    ids: Vec<u32>,
    /// By target id: the draft index, or `u32::MAX`.
    index: Vec<u32>,
}

/// How much of the supervised tokens a draft vocabulary holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coverage {
    pub supervised: usize,
    pub covered: usize,
}

impl Coverage {
    /// From 0 to 1.
    pub fn share(&self) -> f64 {
        self.covered as f64 / self.supervised.max(1) as f64
    }
}

/// What is wrong with a draft vocabulary.
#[derive(Debug, thiserror::Error)]
pub enum VocabError {
    #[error("draft.vocab_size is {size}, more than the target's {target}; take {target} or less")]
    TooLarge { size: usize, target: usize },
    #[error("draft.vocab_size is {size}, too small for the {always} special and reasoning tokens that are always in")]
    TooSmall { size: usize, always: usize },
    #[error("token {id} must be in the draft vocabulary, but the target has only {target} tokens")]
    Outside { id: u32, target: usize },
    #[error("d2t maps draft index {index} to {id}, which is no token of the target ({target} tokens)")]
    D2tOutside { index: usize, id: i64, target: usize },
    #[error("d2t maps draft index {index} to {id}, not above the one before; ids must ascend")]
    D2tOrder { index: usize, id: i64 },
}

impl DraftVocab {
    /// The `size` most frequent supervised tokens, ties by id, the ids in `always` in any case, filled up with the
    /// lowest unused ids. `sequences` gives ids with their loss mask.
    ///
    /// # Errors
    /// When `size` exceeds the target's vocabulary or cannot hold `always`.
    pub fn count<'a>(
        sequences: impl Iterator<Item = (&'a [u32], &'a [bool])>,
        size: usize,
        target: usize,
        always: &[u32],
    ) -> Result<(Self, Coverage), VocabError> {
        if size > target {
            return Err(VocabError::TooLarge { size, target });
        }
        let mut counts = vec![0usize; target];
        for (ids, mask) in sequences {
            for (&id, _) in ids.iter().zip(mask).filter(|&(_, &supervised)| supervised) {
                if let Some(count) = counts.get_mut(id as usize) {
                    *count += 1;
                }
            }
        }
        let mut taken = vec![false; target];
        let mut ids: Vec<u32> = Vec::with_capacity(size);
        for &id in always {
            let place = taken.get_mut(id as usize).ok_or(VocabError::Outside { id, target })?;
            if !std::mem::replace(place, true) {
                ids.push(id);
            }
        }
        if ids.len() > size {
            return Err(VocabError::TooSmall { size, always: ids.len() });
        }
        // Never seen ids come last, lowest first: the padding.
        let mut order: Vec<u32> = (0..target as u32).filter(|&id| !taken[id as usize]).collect();
        order.sort_by_key(|&id| (std::cmp::Reverse(counts[id as usize]), id));
        ids.extend(order.into_iter().take(size - ids.len()));
        ids.sort_unstable();
        let covered = ids.iter().map(|&id| counts[id as usize]).sum();
        let coverage = Coverage { supervised: counts.iter().sum(), covered };
        Ok((Self::from_sorted(ids, target), coverage))
    }

    fn from_sorted(ids: Vec<u32>, target: usize) -> Self {
        let mut index = vec![u32::MAX; target];
        for (draft, &id) in ids.iter().enumerate() {
            index[id as usize] = draft as u32;
        }
        Self { ids, index }
    }

    /// Every token of the target.
    pub fn whole(target: usize) -> Self {
        Self::from_sorted((0..target as u32).collect(), target)
    }

    /// From a checkpoint's offsets.
    ///
    /// # Errors
    /// When an id lies outside the target's vocabulary or the ids do not ascend.
    pub fn from_d2t(d2t: &[i64], target: usize) -> Result<Self, VocabError> {
        let mut ids: Vec<u32> = Vec::with_capacity(d2t.len());
        for (index, &offset) in d2t.iter().enumerate() {
            let id = (index as i64).saturating_add(offset);
            if id < 0 || id >= target as i64 {
                return Err(VocabError::D2tOutside { index, id, target });
            }
            if ids.last().is_some_and(|&last| i64::from(last) >= id) {
                return Err(VocabError::D2tOrder { index, id });
            }
            ids.push(id as u32);
        }
        Ok(Self::from_sorted(ids, target))
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether it holds no token.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Number of the target's tokens.
    pub fn target_size(&self) -> usize {
        self.index.len()
    }

    /// The target ids, ascending.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The target id of a draft index, which must be below [`DraftVocab::len`].
    pub fn to_target(&self, draft: u32) -> u32 {
        self.ids[draft as usize]
    }

    /// The draft index of a target id, if it is in; constant time.
    pub fn to_draft(&self, id: u32) -> Option<u32> {
        self.index.get(id as usize).copied().filter(|&draft| draft != u32::MAX)
    }

    /// Offsets as checkpoints store them: `target id = draft index + d2t[draft index]`.
    pub fn d2t(&self) -> Vec<i64> {
        self.ids.iter().enumerate().map(|(draft, &id)| i64::from(id) - draft as i64).collect()
    }

    /// Per target id whether it is in.
    pub fn t2d(&self) -> Vec<bool> {
        self.index.iter().map(|&draft| draft != u32::MAX).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn count(ids: &[u32], mask: &[bool], size: usize, always: &[u32]) -> Result<(DraftVocab, Coverage), VocabError> {
        DraftVocab::count([(ids, mask)].into_iter(), size, 10, always)
    }

    #[test]
    fn frequent_tokens_ties_by_id_padding_lowest_first() {
        let ids = [9, 9, 7, 5, 8, 3];
        let mask = [true, true, true, true, true, false];
        // 9 twice; 5, 7, 8 once each, 3 is not supervised.
        let (vocab, coverage) = count(&ids, &mask, 3, &[]).unwrap();
        assert_eq!(vocab.ids(), [5, 7, 9]);
        assert_eq!(coverage, Coverage { supervised: 5, covered: 4 });
        let (vocab, coverage) = count(&ids, &mask, 7, &[6]).unwrap();
        assert_eq!(vocab.ids(), [0, 1, 5, 6, 7, 8, 9]);
        assert_eq!(coverage.share(), 1.0);
        assert_eq!((vocab.to_draft(6), vocab.to_draft(3), vocab.to_target(2)), (Some(3), None, 5));
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert!(matches!(count(&[], &[], 11, &[]), Err(VocabError::TooLarge { .. })));
        assert!(matches!(count(&[], &[], 1, &[1, 2]), Err(VocabError::TooSmall { .. })));
        assert!(matches!(count(&[], &[], 5, &[10]), Err(VocabError::Outside { .. })));
        assert!(matches!(DraftVocab::from_d2t(&[0, 20], 10), Err(VocabError::D2tOutside { .. })));
        assert!(matches!(DraftVocab::from_d2t(&[3, 2], 10), Err(VocabError::D2tOrder { .. })));
        assert!(matches!(DraftVocab::from_d2t(&[i64::MAX, i64::MIN], 10), Err(VocabError::D2tOutside { .. })));
    }

    #[test]
    fn the_whole_vocabulary_maps_every_id_to_itself() {
        let (vocab, coverage) = count(&[4, 4, 9], &[true; 3], 10, &[0, 9]).unwrap();
        assert_eq!(vocab, DraftVocab::whole(10));
        assert_eq!((vocab.d2t(), coverage.share()), (vec![0; 10], 1.0));
        assert_eq!((vocab.to_draft(7), vocab.to_draft(10)), (Some(7), None));
        // No supervised token: nothing is covered, and nothing divides by zero.
        assert_eq!(count(&[], &[], 10, &[]).unwrap().1.share(), 0.0);
    }

    proptest! {
        #[test]
        fn the_most_frequent_are_in_and_both_maps_agree(
            tokens in prop::collection::vec((0u32..10, any::<bool>()), 0..40),
            size in 1usize..=10,
            always in prop::collection::btree_set(0u32..10, 0..4),
        ) {
            let (ids, mask): (Vec<u32>, Vec<bool>) = tokens.into_iter().unzip();
            let always: Vec<u32> = always.into_iter().collect();
            let made = count(&ids, &mask, size, &always);
            prop_assert_eq!(made.is_err(), always.len() > size);
            let Ok((vocab, coverage)) = made else { return Ok(()) };
            prop_assert_eq!(vocab.len(), size);
            prop_assert!(vocab.ids().windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(always.iter().all(|&id| vocab.to_draft(id).is_some()));
            // Whoever is in without being forced in comes before whoever is out, by count and then by id.
            let seen = |id: u32| ids.iter().zip(&mask).filter(|&(&i, &m)| m && i == id).count();
            let rank = |id: u32| (std::cmp::Reverse(seen(id)), id);
            let chosen = vocab.ids().iter().filter(|id| !always.contains(id));
            let last_in = chosen.map(|&id| rank(id)).max();
            let first_out = (0..10).filter(|&id| vocab.to_draft(id).is_none()).map(rank).min();
            if let (Some(last_in), Some(first_out)) = (last_in, first_out) {
                prop_assert!(last_in < first_out);
            }
            let covered = ids.iter().zip(&mask).filter(|&(&id, &m)| m && vocab.to_draft(id).is_some()).count();
            prop_assert_eq!(coverage, Coverage { supervised: mask.iter().filter(|&&m| m).count(), covered });

            prop_assert_eq!(&DraftVocab::from_d2t(&vocab.d2t(), 10).unwrap(), &vocab);
            let t2d = vocab.t2d();
            prop_assert_eq!(t2d.iter().filter(|&&x| x).count(), size);
            for draft in 0..size as u32 {
                prop_assert_eq!(vocab.to_draft(vocab.to_target(draft)), Some(draft));
                prop_assert_eq!(i64::from(vocab.to_target(draft)), i64::from(draft) + vocab.d2t()[draft as usize]);
                prop_assert!(t2d[vocab.to_target(draft) as usize]);
            }
        }

        #[test]
        fn any_offsets_are_a_vocabulary_or_an_error(d2t in prop::collection::vec(-4i64..8, 0..6)) {
            if let Ok(vocab) = DraftVocab::from_d2t(&d2t, 10) {
                prop_assert_eq!(vocab.d2t(), d2t);
            }
        }
    }
}
