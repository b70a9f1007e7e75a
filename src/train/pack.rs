//! Which documents go into which step: a pure function of their lengths, the recipe and its seed.
//!
//! Because the plan can be made again, a checkpoint holds only how many steps were taken of it.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::recipe::TrainRecipe;

/// Documents packed together, as indices.
pub type Pack = Vec<usize>;

/// The packs of every optimizer step of the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<Vec<Pack>>,
}

impl Plan {
    /// Shuffles the documents anew each epoch and fills packs of whole documents, in order, up to `pack_tokens`.
    ///
    /// A document longer than the budget is a pack of its own.
    pub fn new(lengths: &[usize], recipe: &TrainRecipe) -> Self {
        let mut packs = Vec::new();
        for epoch in 0..recipe.epochs {
            let mut order: Vec<usize> = (0..lengths.len()).collect();
            let mut rng = ChaCha8Rng::seed_from_u64(recipe.seed);
            rng.set_stream(epoch as u64);
            order.shuffle(&mut rng);
            let (mut pack, mut used) = (Vec::new(), 0);
            for document in order {
                if used + lengths[document] > recipe.pack_tokens && !pack.is_empty() {
                    packs.push(std::mem::take(&mut pack));
                    used = 0;
                }
                used += lengths[document];
                pack.push(document);
            }
            if !pack.is_empty() {
                packs.push(pack);
            }
        }
        let mut steps: Vec<Vec<Pack>> = packs.chunks(recipe.accumulate.max(1)).map(<[Pack]>::to_vec).collect();
        if recipe.max_steps > 0 {
            steps.truncate(recipe.max_steps);
        }
        Self { steps }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_document_appears_once_an_epoch_and_packs_keep_to_the_budget(
            lengths in proptest::collection::vec(1usize..900, 1..60),
            epochs in 1usize..4,
            accumulate in 1usize..4,
        ) {
            let recipe = TrainRecipe { epochs, accumulate, pack_tokens: 512, ..Default::default() };
            let plan = Plan::new(&lengths, &recipe);
            let mut seen = vec![0; lengths.len()];
            for pack in plan.steps.iter().flatten() {
                let tokens: usize = pack.iter().map(|&d| lengths[d]).sum();
                prop_assert!(tokens <= 512 || pack.len() == 1);
                pack.iter().for_each(|&d| seen[d] += 1);
            }
            prop_assert!(seen.iter().all(|&n| n == epochs));
            prop_assert_eq!(&plan, &Plan::new(&lengths, &recipe));
        }
    }

    #[test]
    fn epochs_differ_in_order() {
        let recipe = TrainRecipe { epochs: 2, pack_tokens: 1, ..Default::default() };
        let plan = Plan::new(&[1; 20], &recipe);
        assert_ne!(plan.steps[..20], plan.steps[20..]);
    }
}
