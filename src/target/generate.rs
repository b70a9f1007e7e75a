//! Sampling, and generation with continuous batching: a finished row's place goes to the next prompt at once.

use std::collections::VecDeque;

use burn::tensor::Tensor;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::cache::KvCache;
use super::model::{TargetModel, index};

/// How tokens are drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    /// 0 takes the likeliest token.
    pub temperature: f64,
    /// Draws from the likeliest tokens that together reach this probability.
    pub top_p: f64,
}

impl Sampler {
    /// The likeliest token always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0 };

    /// What a row of logits says of each token: softmax at the temperature, cut at `top_p` and scaled to one.
    /// Greedy puts everything on the first of the likeliest tokens.
    pub fn probabilities(&self, logits: &[f32]) -> Vec<f32> {
        if self.temperature <= 0.0 {
            let mut one_hot = vec![0.0; logits.len()];
            one_hot[argmax(logits)] = 1.0;
            return one_hot;
        }
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let inverse = (1.0 / self.temperature) as f32;
        let mut p: Vec<f32> = logits.iter().map(|&x| ((x - largest) * inverse).exp()).collect();
        let sum: f32 = p.iter().sum();
        p.iter_mut().for_each(|p| *p /= sum);
        if self.top_p < 1.0 {
            let mut order: Vec<u32> = (0..p.len() as u32).collect();
            order.sort_unstable_by(|&a, &b| p[b as usize].total_cmp(&p[a as usize]).then(a.cmp(&b)));
            let mut reached = 0.0f64;
            let kept = order.iter().position(|&i| {
                reached += f64::from(p[i as usize]);
                reached >= self.top_p
            });
            for &i in &order[kept.map_or(order.len(), |last| last + 1)..] {
                p[i as usize] = 0.0;
            }
            let sum: f32 = p.iter().sum();
            p.iter_mut().for_each(|p| *p /= sum);
        }
        p
    }

    /// One token from a row of logits.
    pub fn draw(&self, logits: &[f32], rng: &mut impl Rng) -> u32 {
        if self.temperature <= 0.0 { argmax(logits) as u32 } else { pick(&self.probabilities(logits), rng) }
    }
}

/// The first of the largest.
pub fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (i, &x) in row.iter().enumerate() {
        if x > row[best] {
            best = i;
        }
    }
    best
}

/// An index with the given probabilities (not negative, any positive sum).
pub fn pick(p: &[f32], rng: &mut impl Rng) -> u32 {
    let sum: f64 = p.iter().map(|&p| f64::from(p)).sum();
    let mut left = rng.random::<f64>() * sum;
    let mut last = 0;
    for (i, &p) in p.iter().enumerate() {
        if p > 0.0 {
            last = i;
            left -= f64::from(p);
            if left < 0.0 {
                break;
            }
        }
    }
    last as u32
}

/// A random stream of its own for each named sequence, so that a sequence does not depend on its neighbours.
pub fn stream(seed: u64, name: &str) -> ChaCha8Rng {
    let mut hash = Sha256::new();
    hash.update(seed.to_le_bytes());
    hash.update(name.as_bytes());
    ChaCha8Rng::from_seed(hash.finalize().into())
}

/// The rows of a `[rows, width]` tensor on the host.
pub fn host_rows(x: Tensor<2>) -> Vec<f32> {
    x.into_data().convert::<f32>().try_into_vec().expect("a float tensor")
}

/// A prompt to go on from.
#[derive(Debug, Clone)]
pub struct Request {
    /// Names the random stream.
    pub name: String,
    pub prompt: Vec<u32>,
    /// Most output tokens.
    pub max_tokens: usize,
}

/// What came of a [`Request`].
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The request's place in the list.
    pub request: usize,
    /// Output tokens, the stop token included.
    pub output: Vec<u32>,
    /// It ended by a stop token, not by length.
    pub stopped: bool,
}

struct Live {
    request: usize,
    output: Vec<u32>,
    rng: ChaCha8Rng,
}

/// Answers every request, `batch` at a time, and hands each answer over as it is done; the order is that of finishing.
/// `each` returns false to stop early. `progress` hears how many tokens each step drew.
pub fn generate(
    model: &TargetModel,
    requests: &[Request],
    sampler: Sampler,
    batch: usize,
    seed: u64,
    mut progress: impl FnMut(usize),
    mut each: impl FnMut(Answer) -> bool,
) {
    let config = &model.config;
    let rows = batch.min(requests.len());
    let mut cache =
        KvCache::new(config.num_hidden_layers, rows, config.num_key_value_heads, config.head_dim, model.device());
    let mut waiting: VecDeque<usize> = (0..requests.len()).collect();
    let mut live: Vec<Option<Live>> = (0..rows).map(|_| None).collect();
    loop {
        let free: Vec<usize> = (0..rows).filter(|&row| live[row].is_none()).collect();
        let starting: Vec<(usize, usize)> =
            free.into_iter().map_while(|row| waiting.pop_front().map(|request| (row, request))).collect();
        if !starting.is_empty() {
            // All but a prompt's last token: that one is fed by the step below, like any newest token.
            let prompts: Vec<&[u32]> = starting
                .iter()
                .map(|&(_, request)| requests[request].prompt.split_last().map_or(&[][..], |(_, head)| head))
                .collect();
            // Prompts of one token have nothing to prefill, and a pass cannot be empty.
            let keys = match prompts.iter().all(|prompt| prompt.is_empty()) {
                true => Vec::new(),
                false => model.prefill_keys(&prompts, &[]).1,
            };
            let mut at = 0;
            for (&(row, request), prompt) in starting.iter().zip(&prompts) {
                cache.insert(row, &keys, at, prompt.len());
                at += prompt.len();
                let rng = stream(seed, &requests[request].name);
                live[row] = Some(Live { request, output: Vec::new(), rng });
            }
        }
        if live.iter().all(Option::is_none) {
            return;
        }
        let newest = |row: &Option<Live>| match row {
            Some(live) => live.output.last().or(requests[live.request].prompt.last()).copied().unwrap_or(0),
            None => 0,
        };
        let tokens: Vec<Vec<u32>> = live.iter().map(|row| vec![newest(row)]).collect();
        let pass = model.step(&tokens, &[], &mut cache);
        cache.commit(&live.iter().map(|row| usize::from(row.is_some())).collect::<Vec<_>>());
        let busy: Vec<usize> = (0..rows).filter(|&row| live[row].is_some()).collect();
        let last = pass.last.select(0, index(busy.iter().copied(), model.device()));
        let logits = host_rows(model.logits(last));
        let width = config.vocab_size;
        let drawn: Vec<u32> = live
            .iter_mut()
            .flatten()
            .zip(logits.chunks_exact(width))
            .collect::<Vec<_>>()
            .into_par_iter()
            .map(|(live, logits)| sampler.draw(logits, &mut live.rng))
            .collect();
        progress(drawn.len());
        for (row, token) in busy.into_iter().zip(drawn) {
            let Some(current) = &mut live[row] else { continue };
            current.output.push(token);
            let stopped = config.eos_token_ids.contains(&token);
            let full = current.output.len() >= requests[current.request].max_tokens;
            if stopped || full {
                cache.clear(row);
                if let Some(done) = live[row].take()
                    && !each(Answer { request: done.request, output: done.output, stopped })
                {
                    return;
                }
            }
        }
    }
}
