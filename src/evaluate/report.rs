//! Acceptance per dataset, measured by decoding.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use serde::Serialize;

use super::decode::{Counts, Speculator};
use crate::target::generate::{Request, generate};

/// A held-out prompt with the dataset it is counted under.
#[derive(Debug, Clone)]
pub struct Prompt {
    pub dataset: String,
    pub request: Request,
}

/// What decoding measured.
#[derive(Debug, Clone, Serialize)]
pub struct DecodeReport {
    /// Drafts a verification.
    pub k: usize,
    /// 0 is greedy.
    pub temperature: f64,
    pub prompts: usize,
    /// Tokens a verification over all prompts, the bonus token counted.
    pub acceptance_length: f64,
    pub per_position: Vec<f64>,
    pub rounds: usize,
    pub datasets: BTreeMap<String, DatasetReport>,
    pub tokens_with_head: usize,
    pub tokens_per_second_with_head: f64,
    /// Absent when plain decoding was not run.
    pub tokens_per_second_without: Option<f64>,
    /// Greedy only: outputs equal to plain decoding, token for token.
    pub identical_outputs: Option<usize>,
}

/// One dataset's share.
#[derive(Debug, Clone, Serialize)]
pub struct DatasetReport {
    pub acceptance_length: f64,
    pub per_position: Vec<f64>,
    pub rounds: usize,
}

/// Decodes every prompt with the head, and without it where `compare` is set. `go_on` hears of each answer; when it
/// says no, the measurement is given up and `None` returned.
pub fn decode(
    speculator: &Speculator,
    prompts: &[Prompt],
    batch: usize,
    seed: u64,
    compare: bool,
    mut go_on: impl FnMut() -> bool,
) -> Option<DecodeReport> {
    let mut whole = true;
    let requests: Vec<Request> = prompts.iter().map(|p| p.request.clone()).collect();
    let mut outputs: Vec<Vec<u32>> = vec![Vec::new(); requests.len()];
    let mut all = Counts::new(speculator.k);
    let mut datasets: BTreeMap<String, Counts> = BTreeMap::new();
    let begun = Instant::now();
    speculator.decode(&requests, batch, seed, |answer, counts| {
        all.merge(&counts);
        let dataset = &prompts[answer.request].dataset;
        datasets.entry(dataset.clone()).or_insert_with(|| Counts::new(speculator.k)).merge(&counts);
        outputs[answer.request] = answer.output;
        whole = go_on();
        whole
    });
    if !whole {
        return None;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let tokens: usize = outputs.iter().map(Vec::len).sum();
    let mut report = DecodeReport {
        k: speculator.k,
        temperature: speculator.sampler.temperature,
        prompts: requests.len(),
        acceptance_length: all.acceptance_length(),
        per_position: all.per_position(),
        rounds: all.rounds,
        datasets: datasets
            .into_iter()
            .map(|(name, counts)| {
                let per_position = counts.per_position();
                let acceptance_length = counts.acceptance_length();
                (name, DatasetReport { acceptance_length, per_position, rounds: counts.rounds })
            })
            .collect(),
        tokens_with_head: tokens,
        tokens_per_second_with_head: tokens as f64 / seconds,
        tokens_per_second_without: None,
        identical_outputs: None,
    };
    if compare {
        let (mut tokens, mut identical) = (0, 0);
        let begun = Instant::now();
        generate(
            speculator.model,
            &requests,
            speculator.sampler,
            batch,
            seed,
            |_| {},
            |answer| {
                tokens += answer.output.len();
                identical += usize::from(answer.output == outputs[answer.request]);
                whole = go_on();
                whole
            },
        );
        if !whole {
            return None;
        }
        report.tokens_per_second_without = Some(tokens as f64 / begun.elapsed().as_secs_f64());
        report.identical_outputs = (speculator.sampler.temperature <= 0.0).then_some(identical);
    }
    Some(report)
}

impl fmt::Display for DecodeReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let how = if self.temperature <= 0.0 { "greedy".into() } else { format!("temperature {}", self.temperature) };
        writeln!(f, "speculative decoding, k = {}, {how}, {} held-out prompts", self.k, self.prompts)?;
        writeln!(f, "  {:<18} {:>10}  {:>7}  kept at each position", "dataset", "acceptance", "rounds")?;
        let positions =
            |shares: &[f64]| shares.iter().map(|p| format!("{:.0}%", p * 100.0)).collect::<Vec<_>>().join(" ");
        for (name, dataset) in &self.datasets {
            let shares = positions(&dataset.per_position);
            writeln!(f, "  {name:<18} {:>10.3}  {:>7}  {shares}", dataset.acceptance_length, dataset.rounds)?;
        }
        let shares = positions(&self.per_position);
        writeln!(f, "  {:<18} {:>10.3}  {:>7}  {shares}", "all", self.acceptance_length, self.rounds)?;
        write!(f, "  {:.0} tokens/s with the head", self.tokens_per_second_with_head)?;
        if let Some(without) = self.tokens_per_second_without {
            write!(f, ", {without:.0} without")?;
        }
        if let Some(identical) = self.identical_outputs {
            write!(f, "; {identical} of {} outputs equal to plain decoding", self.prompts)?;
        }
        Ok(())
    }
}
