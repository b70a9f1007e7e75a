//! Capture: prompts to the target, exact token ids back.
//!
//! In: prompts in any of the shapes people have, and a target: a live server, or the embedded engine. Out: journal.jsonl,
//! one captured [`Sequence`] a line, and train.jsonl and held_out.jsonl made from it, split by prompt.
//! Open `live.rs` for the run against servers; then `prompts/` (what is asked), `render.rs` (as which ids), `jobs.rs`
//! (with which cap), `engine/` (in whose words), `http.rs` (over which wire), `concurrency.rs` (how many at once),
//! `order.rs` (in which order), `reasoning.rs` (whether it thought), `journal.rs` (the files that survive a kill),
//! `status.rs` (what is shown). `embedded.rs` is the run with the engine in this process.

pub mod concurrency;
pub mod embedded;
pub mod engine;
pub mod http;
pub mod jobs;
pub mod journal;
pub mod live;
pub mod order;
pub mod prompts;
pub mod reasoning;
pub mod render;
pub mod status;

use std::path::PathBuf;
use std::sync::Arc;

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
    /// How the answer came, where a server gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took: Option<Took>,
}

/// How an answer came: what planning needs to know of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Took {
    /// The class's name; empty outside every class.
    pub class: String,
    /// The cap it was asked under.
    pub max_tokens: usize,
    /// Seconds since 1970 when it was asked.
    pub asked: f64,
    /// Seconds from asking to the last token.
    pub seconds: f64,
    /// Requests in flight, this one too, when it ended.
    pub in_flight: usize,
    /// Which of the servers.
    pub server: usize,
}

/// How a class draws.
#[derive(Debug, Clone, PartialEq)]
pub struct Draw {
    pub temperature: f64,
    pub top_p: f64,
    /// 0 draws from all tokens.
    pub top_k: usize,
    pub stop_token_ids: Vec<u32>,
}

/// One answer to be asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// The captured sequence's id.
    pub id: String,
    /// The request's name at the server; other for every try, so that a late abort cannot hit the next one.
    pub rid: String,
    /// The prompt's id, which decides whether it is held out.
    pub prompt: String,
    pub dataset: String,
    /// Which of [`jobs::Classes`].
    pub class: usize,
    pub prompt_ids: Arc<Vec<u32>>,
    /// Cap on output tokens, within the server's context.
    pub max_tokens: usize,
    pub seed: u64,
}

/// Why a capture cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    /// A row that is not a prompt.
    #[error("{path}:{line}: {reason}")]
    Prompt { path: PathBuf, line: usize, reason: String },
    /// A source of prompts that cannot be read.
    #[error("{source_name}: {reason}")]
    Source { source_name: String, reason: String },
    /// A line of an earlier capture that is not a sequence, with lines behind it.
    #[error("{path}:{line}: {reason}; move the file away to capture anew")]
    Journal { path: PathBuf, line: usize, reason: String },
    /// Another process writes the same journal.
    #[error("{path}: another capture is writing it; wait for it, or give capture.out another folder")]
    Locked { path: PathBuf },
    /// The target refuses a prompt, or itself cannot be read.
    #[error(transparent)]
    Target(#[from] crate::target::TargetError),
    /// A server does not answer, or not as this engine does.
    #[error("{url}: {reason}")]
    Server { url: String, reason: String },
    /// A server runs another model than the capture began with, or than its siblings.
    #[error("{url}: serves another model: {reason}; captured answers of two models must not mix")]
    OtherModel { url: String, reason: String },
    /// Answers break the recipe's rule on reasoning.
    #[error("{0}")]
    Reasoning(String),
    /// Failures that no retry cures.
    #[error("stopped after {count} refusals in a row, the last of {id}: {reason}")]
    Refused { count: usize, id: String, reason: String },
    /// Nothing to ask.
    #[error("{0}")]
    Nothing(String),
}

impl CaptureError {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        |source| Self::Io { path, source }
    }
}
