//! Capture: prompts to the target, exact token ids back.
//!
//! In: JSONL files of `{id, dataset, messages}` and a target. Out: captured sequences, one JSONL line each, split into
//! train and held-out by prompt. Open `prompts.rs` for the reader, `embedded.rs` for the run with the embedded engine,
//! `journal.rs` for the file that survives a kill.

pub mod embedded;
pub mod journal;
pub mod prompts;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::recipe::SegmentKind;

/// Output tokens `start..end` are of one kind. Segments tile the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    pub kind: SegmentKind,
    pub start: usize,
    pub end: usize,
}

/// How the output was drawn.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    pub temperature: f64,
    pub top_p: f64,
    pub seed: u64,
}

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

/// Why a capture cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    /// A line that is not a prompt.
    #[error("{path}:{line}: {reason}")]
    Prompt { path: PathBuf, line: usize, reason: String },
    /// A line of an earlier capture that is not a sequence, with lines behind it.
    #[error("{path}:{line}: {reason}; move the file away to capture anew")]
    Journal { path: PathBuf, line: usize, reason: String },
    /// The target refuses a prompt, or itself cannot be read.
    #[error(transparent)]
    Target(#[from] crate::target::TargetError),
}

impl CaptureError {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        |source| Self::Io { path, source }
    }
}
