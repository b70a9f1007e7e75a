//! Sequences: captured token ids, checked, with the loss mask over them.
//!
//! In: JSONL and Parquet files. Out: [`TrainSequence`]s and a report of what was left out and why. Open `read.rs` for
//! the readers, `loops.rs` for the detector of outputs that repeat themselves.

pub mod loops;
pub mod read;

pub use read::{ReadError, ReadOptions, ReadReport, read};

/// A sequence ready for training: token ids and which of them are supervised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainSequence {
    pub id: String,
    pub dataset: String,
    /// Prompt and output.
    pub ids: Vec<u32>,
    /// One entry a token; true where the head learns to foretell that token.
    pub loss_mask: Vec<bool>,
    /// Tokens before the output.
    pub prompt_length: usize,
}
