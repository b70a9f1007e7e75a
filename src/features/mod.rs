//! Features: the target's hidden states of every token of every sequence, on disk.
//!
//! In: sequences and a target. Out: one safetensors file a sequence in the very layout that vLLM's hidden-states
//! connector writes, so that both feed one reader. Open `file.rs` for that layout, `store.rs` for the folder,
//! `extract.rs` for the run with the embedded engine.

pub mod extract;
pub mod file;
pub mod store;

use std::path::PathBuf;

/// What is wrong with hidden states.
#[derive(Debug, thiserror::Error)]
pub enum FeaturesError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    /// Not a file of hidden states, or not of these tokens and layers.
    #[error("{path}: {reason}; remove it to extract it again")]
    File { path: PathBuf, reason: String },
    /// The target gave states that are no numbers.
    #[error("the target's states of sequence {id} hold a value that is not finite at token {token}, slot {slot}")]
    NotFinite { id: String, token: usize, slot: usize },
    /// Layers that the target does not have.
    #[error("features.layers {layers:?} must ascend and lie between 0 and {count}, the target's number of layers")]
    Layers { layers: Vec<usize>, count: usize },
}
