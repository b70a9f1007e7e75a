//! Captured sequences: token ids, never text.
//!
//! In: JSONL and Parquet files. Out: checked [`Sequence`]s and their loss masks.
//! Open `read.rs` for the readers and their reports, `loops.rs` for the detector of repeating outputs.

use serde::{Deserialize, Serialize};

/// What a stretch of the output is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SegmentKind { Reasoning, Answer, ToolCall }

/// Output tokens `start..end` are of one kind. Segments tile the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment { pub kind: SegmentKind, pub start: usize, pub end: usize }

/// How the output was drawn.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sampling { pub temperature: f64, pub top_p: f64, pub seed: u64 }

/// One prompt and the answer a target gave, as the exact ids it saw and sampled (stop token included).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sequence {
    pub id: String,
    pub dataset: String,
    pub prompt_ids: Vec<u32>,
    pub output_ids: Vec<u32>,
    /// `stop` or `length`.
    pub finish_reason: String,
    pub sampling: Option<Sampling>,
    pub segments: Vec<Segment>,
}
#[derive(Debug, Clone)]
pub struct TrainSequence { pub id: String, pub dataset: String, pub ids: Vec<u32>, pub loss_mask: Vec<bool>, pub prompt_length: usize }
