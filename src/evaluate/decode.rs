//! Speculative decoding with the embedded target: a chain of drafts, one verification, again.
//!
//! Row i of the draft head pairs the target's fused state at token i with token i + 1 and stands at position i + 1,
//! as in training. After a verification the states of the kept tokens are known, and the head is fed those rows
//! anew (its own guesses at them are dropped); the last of them drafts the first token, and the chain goes on from the
//! head's own output.

use std::collections::VecDeque;

use burn::tensor::Tensor;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::verify::{self, Verdict};
use crate::draft::head::{DraftHead, Rotation};
use crate::draft::vocab::DraftVocab;
use crate::target::TargetModel;
use crate::target::cache::KvCache;
use crate::target::generate::{Answer, Request, Sampler, argmax, host_rows, pick, stream};
use crate::target::model::index;
use crate::target::rope::RopeTable;

/// What verifications kept.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Verifications.
    pub rounds: usize,
    /// Verifications that kept the draft at each position.
    pub accepted: Vec<usize>,
}

impl Counts {
    /// For chains of `k` drafts.
    pub fn new(k: usize) -> Self {
        Self { rounds: 0, accepted: vec![0; k] }
    }

    fn add(&mut self, accepted: usize) {
        self.rounds += 1;
        self.accepted[..accepted].iter_mut().for_each(|count| *count += 1);
    }

    /// Adds another's counts.
    pub fn merge(&mut self, other: &Self) {
        self.rounds += other.rounds;
        self.accepted.iter_mut().zip(&other.accepted).for_each(|(a, b)| *a += b);
    }

    /// Tokens a verification, the bonus token counted.
    pub fn acceptance_length(&self) -> f64 {
        1.0 + self.accepted.iter().sum::<usize>() as f64 / self.rounds.max(1) as f64
    }

    /// Share of verifications that kept the draft at each position.
    pub fn per_position(&self) -> Vec<f64> {
        self.accepted.iter().map(|&count| count as f64 / self.rounds.max(1) as f64).collect()
    }
}

/// A target with its draft head, ready to decode.
pub struct Speculator<'a> {
    pub model: &'a TargetModel,
    pub head: &'a DraftHead,
    pub vocab: &'a DraftVocab,
    /// Drafts a verification, at least 1.
    pub k: usize,
    pub sampler: Sampler,
}

struct Live {
    request: usize,
    output: Vec<u32>,
    rng: ChaCha8Rng,
    counts: Counts,
    /// Tokens kept by the last verification: the head has not seen them yet.
    fresh: Vec<u32>,
}

impl Speculator<'_> {
    /// Answers every request, `batch` at a time; the order is that of finishing. `each` returns false to stop early.
    pub fn decode(&self, requests: &[Request], batch: usize, seed: u64, mut each: impl FnMut(Answer, Counts) -> bool) {
        let (model, head, k) = (self.model, self.head, self.k);
        let device = model.device();
        let (target, draft) = (&model.config, &head.config);
        let rows = batch.min(requests.len());
        let width = k + 1;
        let mut cache =
            KvCache::new(target.num_hidden_layers, rows, target.num_key_value_heads, target.head_dim, device);
        let mut drafts_cache = KvCache::new(1, rows, draft.num_key_value_heads, draft.head_dim, device);
        let rope = RopeTable::new(&draft.rope, draft.head_dim, 4096, device);
        // The head's features of the tokens fed at the last verification, `[rows * (k + 1), hidden]`.
        let mut features: Tensor<2> = Tensor::zeros([rows * width, draft.hidden_size], device);
        let mut waiting: VecDeque<usize> = (0..requests.len()).collect();
        let mut live: Vec<Option<Live>> = (0..rows).map(|_| None).collect();
        loop {
            let free: Vec<usize> = (0..rows).filter(|&row| live[row].is_none()).collect();
            let starting: Vec<(usize, usize)> =
                free.into_iter().map_while(|row| waiting.pop_front().map(|request| (row, request))).collect();
            if !starting.is_empty() {
                let prompts: Vec<&[u32]> = starting.iter().map(|&(_, r)| requests[r].prompt.as_slice()).collect();
                let (pass, keys) = model.prefill_keys(&prompts, &draft.aux_layers);
                let fused = head.fuse(Tensor::cat(pass.aux, 1));
                let ends: Vec<usize> = prompts
                    .iter()
                    .scan(0, |at, prompt| {
                        *at += prompt.len();
                        Some(*at)
                    })
                    .collect();
                let last = pass.last.select(0, index(ends.iter().map(|&end| end - 1), device));
                let logits = host_rows(model.logits(last));
                // Keys of all rows: the pair of a prompt's last state is not known yet and stays unused.
                let next: Vec<u32> = prompts.iter().flat_map(|p| p[1..].iter().copied().chain([0])).collect();
                let positions: Vec<usize> = prompts.iter().flat_map(|p| 1..p.len() + 1).collect();
                let projected = head.project(self.embed(&next), fused.clone(), &rotation(&rope, &positions), None);
                let draft_keys = vec![(projected.k, projected.v)];
                for (i, &(row, request)) in starting.iter().enumerate() {
                    let length = prompts[i].len();
                    cache.insert(row, &keys, ends[i] - length, length);
                    drafts_cache.insert(row, &draft_keys, ends[i] - length, length - 1);
                    drafts_cache.set_next_position(row, length);
                    let feature = fused.clone().narrow(0, ends[i] - 1, 1);
                    features = features.slice_assign([row * width..row * width + 1, 0..draft.hidden_size], feature);
                    let mut rng = stream(seed, &requests[request].name);
                    let token =
                        self.sampler.draw(&logits[i * target.vocab_size..(i + 1) * target.vocab_size], &mut rng);
                    let counts = Counts::new(k);
                    live[row] = Some(Live { request, output: vec![token], rng, counts, fresh: vec![token] });
                }
                if !self.retire(requests, &mut live, &mut cache, &mut drafts_cache, &mut each) {
                    return;
                }
                // A first token that ends its answer frees the row at once.
                if live.iter().any(Option::is_none) && !waiting.is_empty() {
                    continue;
                }
            }
            if live.iter().all(Option::is_none) {
                return;
            }
            let busy: Vec<bool> = live.iter().map(Option::is_some).collect();
            let (drafted, q) = self.draft(&mut live, &mut drafts_cache, features, &rope);
            let tokens: Vec<Vec<u32>> = live
                .iter()
                .zip(&drafted)
                .map(|(row, drafts)| {
                    let newest = row.as_ref().and_then(|row| row.output.last()).copied().unwrap_or(0);
                    [newest].into_iter().chain(drafts.iter().copied()).collect()
                })
                .collect();
            let pass = model.step(&tokens, &draft.aux_layers, &mut cache);
            let logits = host_rows(model.logits(pass.last));
            features = head.fuse(Tensor::cat(pass.aux, 1));
            let size = target.vocab_size;
            let verdicts: Vec<Option<Verdict>> = live
                .par_iter_mut()
                .enumerate()
                .map(|(row, slot)| {
                    let slot = slot.as_mut()?;
                    let rows: Vec<&[f32]> =
                        logits[row * width * size..(row + 1) * width * size].chunks_exact(size).collect();
                    Some(if self.sampler.temperature <= 0.0 {
                        verify::greedy(&drafted[row], &rows)
                    } else {
                        let p: Vec<Vec<f32>> = rows.iter().map(|row| self.sampler.probabilities(row)).collect();
                        verify::sampled(&drafted[row], &p, &q[row], &mut slot.rng)
                    })
                })
                .collect();
            cache.commit(&verdicts.iter().map(|v| v.map_or(0, |v| v.accepted + 1)).collect::<Vec<_>>());
            debug_assert_eq!(busy, verdicts.iter().map(Option::is_some).collect::<Vec<_>>());
            for ((slot, verdict), drafts) in live.iter_mut().zip(verdicts).zip(&drafted) {
                let (Some(slot), Some(verdict)) = (slot, verdict) else { continue };
                slot.counts.add(verdict.accepted);
                slot.fresh = drafts[..verdict.accepted].iter().copied().chain([verdict.next]).collect();
                slot.output.extend(&slot.fresh);
            }
            if !self.retire(requests, &mut live, &mut cache, &mut drafts_cache, &mut each) {
                return;
            }
        }
    }

    /// Hands over the rows that are done, cut at their stop token or length.
    fn retire(
        &self,
        requests: &[Request],
        live: &mut [Option<Live>],
        cache: &mut KvCache,
        drafts_cache: &mut KvCache,
        each: &mut impl FnMut(Answer, Counts) -> bool,
    ) -> bool {
        let stops = &self.model.config.eos_token_ids;
        for (row, slot) in live.iter_mut().enumerate() {
            let Some(current) = slot else { continue };
            let most = requests[current.request].max_tokens;
            // Only tokens of the last round can have ended it.
            let from = current.output.len() - current.fresh.len();
            let stop = current.output[from..].iter().position(|token| stops.contains(token)).map(|i| from + i + 1);
            let end = stop.unwrap_or(usize::MAX).min(most);
            if current.output.len() < end {
                continue;
            }
            cache.clear(row);
            drafts_cache.clear(row);
            if let Some(mut done) = slot.take() {
                done.output.truncate(end);
                let stopped = stop.is_some_and(|stop| stop <= most);
                if !each(Answer { request: done.request, output: done.output, stopped }, done.counts) {
                    return false;
                }
            }
        }
        true
    }

    /// `k` drafts a row, and under sampling the distributions they were drawn from, over the target's vocabulary.
    #[allow(clippy::type_complexity)]
    fn draft(
        &self,
        live: &mut [Option<Live>],
        cache: &mut KvCache,
        features: Tensor<2>,
        rope: &RopeTable,
    ) -> (Vec<Vec<u32>>, Vec<Vec<Vec<f32>>>) {
        let (head, k) = (self.head, self.k);
        let width = k + 1;
        let mut drafted = vec![Vec::with_capacity(k); live.len()];
        let mut q = vec![Vec::with_capacity(k); live.len()];
        let known: Vec<usize> = live.iter().map(|row| row.as_ref().map_or(0, |row| row.fresh.len())).collect();
        let fed: Vec<u32> = live
            .iter()
            .flat_map(|row| {
                let fresh = row.as_ref().map_or(&[][..], |row| &row.fresh);
                fresh.iter().copied().chain(std::iter::repeat(0)).take(width).collect::<Vec<_>>()
            })
            .collect();
        let lasts: Vec<usize> = known.iter().enumerate().map(|(row, &n)| row * width + n.saturating_sub(1)).collect();
        let mut feature = self.advance(cache, &fed, features, rope, width, Some(&lasts), &known);
        for j in 0..k {
            let (output, normed) = feature;
            let logits = host_rows(head.logits(normed.clone()));
            let chosen: Vec<(u32, Vec<f32>)> = live
                .par_iter_mut()
                .zip(logits.par_chunks_exact(head.config.draft_vocab_size))
                .map(|(slot, logits)| match slot {
                    None => (0, Vec::new()),
                    Some(_) if self.sampler.temperature <= 0.0 => {
                        (self.vocab.to_target(argmax(logits) as u32), Vec::new())
                    }
                    Some(live) => {
                        let small = Sampler { top_p: 1.0, ..self.sampler }.probabilities(logits);
                        let draft = pick(&small, &mut live.rng);
                        let mut q = vec![0.0; self.model.config.vocab_size];
                        for (i, &p) in small.iter().enumerate() {
                            q[self.vocab.to_target(i as u32) as usize] = p;
                        }
                        (self.vocab.to_target(draft), q)
                    }
                })
                .collect();
            for (row, (draft, distribution)) in chosen.into_iter().enumerate() {
                drafted[row].push(draft);
                q[row].push(distribution);
            }
            if j + 1 == k {
                break;
            }
            let tokens: Vec<u32> = drafted.iter().map(|drafts| drafts[j]).collect();
            let next = head.next_feature(output, normed);
            let keep: Vec<usize> = live.iter().map(|row| usize::from(row.is_some())).collect();
            feature = self.advance(cache, &tokens, next, rope, 1, None, &keep);
        }
        for (row, slot) in live.iter().enumerate() {
            if slot.is_some() {
                cache.take_back(row, k - 1);
            }
        }
        (drafted, q)
    }

    /// Feeds the head `width` tokens a row with their features; gives its output and that output normed for the rows
    /// `picked` (all when `None`), and keeps the first `keep[row]` tokens' keys.
    #[allow(clippy::too_many_arguments)]
    fn advance(
        &self,
        cache: &mut KvCache,
        tokens: &[u32],
        features: Tensor<2>,
        rope: &RopeTable,
        width: usize,
        picked: Option<&[usize]>,
        keep: &[usize],
    ) -> (Tensor<2>, Tensor<2>) {
        let step = cache.open(width, self.head.config.num_attention_heads);
        let rotation = rotation(rope, &step.positions);
        let projected = self.head.project(self.embed(tokens), features, &rotation, None);
        let mut attended = cache.attend(&step, 0, projected.q, projected.k, projected.v);
        let mut residual = projected.residual;
        cache.commit(keep);
        if let Some(rows) = picked {
            let rows = index(rows.iter().copied(), self.model.device());
            attended = attended.select(0, rows.clone());
            residual = residual.select(0, rows);
        }
        self.head.finish(attended, residual)
    }

    fn embed(&self, tokens: &[u32]) -> Tensor<2> {
        let rows = index(tokens.iter().map(|&token| token as usize), self.model.device());
        self.model.embeddings().clone().select(0, rows)
    }
}

fn rotation(rope: &RopeTable, positions: &[usize]) -> Rotation {
    let (cos, sin) = rope.rows(positions);
    Rotation { cos, sin }
}
