//! Captures with the embedded engine.

use super::jobs::{self, Bounds, Classes};
use super::journal::Journal;
use super::prompts::Prompt;
use super::reasoning::{Marks, cut};
use super::render::Renderer;
use super::{CaptureError, Job, Sampling, Sequence};
use crate::progress;
use crate::recipe::CaptureRecipe;
use crate::signals::Signals;
use crate::target::generate::{Request, Sampler, generate};
use crate::target::{TargetModel, TargetTokenizer};

/// What a capture did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Captured {
    /// Sequences that were there from an earlier run.
    pub found: usize,
    /// Sequences captured now.
    pub captured: usize,
    /// Output tokens of those.
    pub output_tokens: usize,
    /// Answers cut by the token cap.
    pub cut: usize,
    /// A signal stopped the run; the same command goes on.
    pub interrupted: Option<i32>,
}

/// Answers every prompt that the journal does not hold yet.
///
/// # Errors
/// When a prompt cannot be rendered or a file cannot be written; what was captured stays.
pub fn capture(
    prompts: &[Prompt],
    recipe: &CaptureRecipe,
    model: &TargetModel,
    tokenizer: TargetTokenizer,
    marks: &Marks,
    signals: &Signals,
) -> Result<Captured, CaptureError> {
    let (mut journal, before) = Journal::open(&recipe.out, |_| {})?;
    let mut result = Captured { found: before.answered.len(), ..Captured::default() };
    let classes = Classes::new(recipe);
    let renderer = Renderer::Tokenizer(Box::new(tokenizer));
    let ids = renderer.local(prompts, recipe.thinking);
    let bounds = Bounds { room: model.config.max_position_embeddings, vocab_size: model.config.vocab_size };
    let planned = jobs::plan(prompts, &ids, &classes, recipe, bounds, &before.answered);
    for skipped in &planned.skipped {
        tracing::warn!("{}: not asked: {}", skipped.id, skipped.reason);
    }
    let jobs = planned.jobs;
    let request =
        |job: &Job| Request { name: job.id.clone(), prompt: job.prompt_ids.to_vec(), max_tokens: job.max_tokens };
    let requests: Vec<Request> = jobs.iter().map(request).collect();

    let bar = progress::bar(requests.len() as u64, "capture {wide_bar} {pos}/{len} answers  {msg}  {eta} left");
    let begun = std::time::Instant::now();
    let mut drawn = 0;
    let mut failure = None;
    let sampler = Sampler { temperature: recipe.temperature, top_p: recipe.top_p };
    let drawing = |tokens: usize| {
        drawn += tokens;
        bar.set_message(format!("{:.0} tokens/s", drawn as f64 / begun.elapsed().as_secs_f64()));
    };
    generate(model, &requests, sampler, recipe.batch, recipe.seed, drawing, |answer| {
        let job = &jobs[answer.request];
        let length = answer.output.len();
        let sequence = Sequence {
            id: job.id.clone(),
            dataset: job.dataset.clone(),
            prompt_ids: job.prompt_ids.to_vec(),
            segments: cut(&job.prompt_ids, &answer.output, !answer.stopped, marks).segments,
            output_ids: answer.output,
            finish_reason: if answer.stopped { "stop" } else { "length" }.into(),
            sampling: Some(Sampling { temperature: recipe.temperature, top_p: recipe.top_p, seed: recipe.seed }),
            took: None,
        };
        if let Err(error) = journal.answer(&sequence) {
            failure = Some(error);
            return false;
        }
        result.captured += 1;
        result.output_tokens += length;
        result.cut += usize::from(!answer.stopped);
        bar.inc(1);
        if bar.is_hidden() && result.captured.is_multiple_of(50) {
            tracing::info!(
                "captured {} of {} answers, {} tokens",
                result.captured,
                requests.len(),
                result.output_tokens
            );
        }
        result.interrupted = signals.received();
        result.interrupted.is_none()
    });
    bar.finish_and_clear();
    match failure {
        Some(error) => Err(error),
        None => Ok(result),
    }
}
