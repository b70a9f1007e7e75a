//! Extracts states with the embedded engine.

use super::FeaturesError;
use super::file::States;
use super::store::FeatureStore;
use crate::progress;
use crate::sequences::TrainSequence;
use crate::signals::Signals;
use crate::target::TargetModel;
use crate::target::generate::host_rows;
use burn::tensor::Tensor;

/// What an extraction did.
#[derive(Debug, Clone, Copy, Default)]
pub struct Extracted {
    /// Sequences whose states were there.
    pub found: usize,
    /// Sequences run through the target now.
    pub extracted: usize,
    /// Their tokens.
    pub tokens: usize,
    pub seconds: f64,
    /// A signal stopped the run; what is written stays.
    pub interrupted: Option<i32>,
}

/// Runs every sequence whose states the store lacks through the target, some `batch_tokens` tokens at a time.
///
/// # Errors
/// When the states are not finite or a file cannot be written.
pub fn extract(
    model: &TargetModel,
    store: &FeatureStore,
    sequences: &[&TrainSequence],
    batch_tokens: usize,
    signals: &Signals,
) -> Result<Extracted, FeaturesError> {
    let io = |source| FeaturesError::Io { path: store.folder().to_path_buf(), source };
    std::fs::create_dir_all(store.folder()).map_err(io)?;
    let missing: Vec<&TrainSequence> = sequences.iter().filter(|s| !store.contains(&s.ids)).copied().collect();
    let mut result = Extracted { found: sequences.len() - missing.len(), ..Extracted::default() };
    let total: usize = missing.iter().map(|s| s.ids.len()).sum();
    let bar = progress::bar(total as u64, "extract {wide_bar} {pos}/{len} tokens  {per_sec}  {eta} left");
    let begun = std::time::Instant::now();
    let mut said = 0;
    let mut at = 0;
    while at < missing.len() {
        let mut end = at;
        let mut tokens = 0;
        while end < missing.len() && (end == at || tokens + missing[end].ids.len() <= batch_tokens) {
            tokens += missing[end].ids.len();
            end += 1;
        }
        let batch = &missing[at..end];
        let documents: Vec<&[u32]> = batch.iter().map(|s| s.ids.as_slice()).collect();
        let pass = model.prefill(&documents, &store.layers);
        let slots: Vec<Tensor<3>> = pass.aux.into_iter().chain([pass.last]).map(|x| x.unsqueeze_dim(1)).collect();
        let hidden = slots[0].dims()[2];
        let width = slots.len() * hidden;
        let data = host_rows(Tensor::cat(slots, 1).reshape([tokens, width]));
        let mut row = 0;
        for sequence in batch {
            let length = sequence.ids.len();
            let part = &data[row * width..(row + length) * width];
            row += length;
            if let Some(i) = part.iter().position(|x| !x.is_finite()) {
                let (token, slot) = (i / width, i / hidden % store.slots());
                return Err(FeaturesError::NotFinite { id: sequence.id.clone(), token, slot });
            }
            let token_ids = sequence.ids.clone();
            store.write(&States { token_ids, slots: store.slots(), hidden, data: part.to_vec() })?;
            result.extracted += 1;
            result.tokens += length;
        }
        bar.inc(tokens as u64);
        if bar.is_hidden() && result.tokens - said >= 20_000 {
            said = result.tokens;
            let rate = result.tokens as f64 / begun.elapsed().as_secs_f64();
            let left = (total - result.tokens) as f64 / rate;
            tracing::info!("extracted {} of {total} tokens, {rate:.0} tokens/s, {left:.0} s left", result.tokens);
        }
        at = end;
        result.interrupted = signals.received();
        if result.interrupted.is_some() {
            break;
        }
    }
    bar.finish_and_clear();
    result.seconds = begun.elapsed().as_secs_f64();
    Ok(result)
}
