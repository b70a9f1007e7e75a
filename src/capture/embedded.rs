//! Captures with the embedded engine.

use super::journal::Journal;
use super::prompts::Prompt;
use super::{CaptureError, Sampling, Segment, Sequence};
use crate::progress;
use crate::recipe::{CaptureRecipe, SegmentKind};
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
    /// Answers that repeat themselves, set apart.
    pub looped: usize,
    /// A signal stopped the run; the same command goes on.
    pub interrupted: Option<i32>,
}

/// Answers every prompt that the files of `out` do not hold yet and appends the answer to `train.jsonl` or
/// `held_out.jsonl`, or to `looped.jsonl` where `is_loop` says that it repeats itself: kept, but neither trained on nor
/// measured on.
///
/// # Errors
/// When a prompt cannot be rendered or a file cannot be written; what was captured stays.
pub fn capture(
    prompts: &[Prompt],
    recipe: &CaptureRecipe,
    model: &TargetModel,
    tokenizer: &TargetTokenizer,
    is_loop: impl Fn(&[u32]) -> bool,
    signals: &Signals,
) -> Result<Captured, CaptureError> {
    std::fs::create_dir_all(&recipe.out).map_err(CaptureError::io(&recipe.out))?;
    let (mut train, mut done) = Journal::open(&recipe.out.join("train.jsonl"))?;
    let (mut held_out, more) = Journal::open(&recipe.out.join("held_out.jsonl"))?;
    let (mut looped, still_more) = Journal::open(&recipe.out.join("looped.jsonl"))?;
    done.extend(more.into_iter().chain(still_more));
    let mut result = Captured { found: done.len(), ..Captured::default() };

    let mut requests = Vec::new();
    let mut of_request = Vec::new();
    for sample in 0..recipe.samples.max(1) {
        for prompt in prompts {
            let held = prompt.is_held_out(recipe.held_out_share);
            let id = if sample == 0 { prompt.id.clone() } else { format!("{}#{sample}", prompt.id) };
            // One answer is enough to measure on.
            if (held && sample > 0) || done.contains(&id) {
                continue;
            }
            let ids = tokenizer.prompt_ids(&prompt.messages)?;
            let room = model.config.max_position_embeddings.saturating_sub(ids.len());
            if room == 0 {
                tracing::warn!("{id}: the prompt fills the target's context; skipped");
                continue;
            }
            requests.push(Request { name: id.clone(), prompt: ids, max_tokens: recipe.max_tokens.min(room) });
            of_request.push((id, prompt, held));
        }
    }

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
        let (id, prompt, held) = &of_request[answer.request];
        let length = answer.output.len();
        let sequence = Sequence {
            id: id.clone(),
            dataset: prompt.dataset.clone(),
            prompt_ids: requests[answer.request].prompt.clone(),
            output_ids: answer.output,
            finish_reason: if answer.stopped { "stop" } else { "length" }.into(),
            sampling: Some(Sampling { temperature: recipe.temperature, top_p: recipe.top_p, seed: recipe.seed }),
            segments: vec![Segment { kind: SegmentKind::Answer, start: 0, end: length }],
        };
        let journal = match (is_loop(&sequence.output_ids), *held) {
            (true, _) => {
                result.looped += 1;
                &mut looped
            }
            (false, true) => &mut held_out,
            (false, false) => &mut train,
        };
        if let Err(error) = journal.append(&sequence) {
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
