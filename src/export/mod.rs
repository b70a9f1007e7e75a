//! Export: the folder that serving engines load.
//!
//! In: a head's weights, shape and draft vocabulary. Out: model.safetensors in bfloat16 and config.json. Open
//! `config_json.rs` for the keys, `engines.rs` for what each engine makes of them, `write.rs` for the folder and its
//! self-check, `read.rs` for the way back (ours, the EAGLE authors' and speculators' folders), `serve.rs` for the
//! commands.

pub mod config_json;
pub mod engines;
pub mod read;
pub mod serve;
pub mod write;

pub use read::{HeadFormat, ReadHead, read_head};
pub use write::{ExportReport, check_folder, write_head};

use std::path::PathBuf;

/// Why a head cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    /// An option that an engine in `export.engines` would silently get wrong.
    #[error("{engine} cannot serve a head with {option}: {why}; train without it, or take {engine} off export.engines")]
    Engine { engine: &'static str, option: &'static str, why: &'static str },
    /// An engine nobody here knows.
    #[error("export.engines names `{0}`; engines are `vllm`, `sglang` and `llama.cpp`")]
    UnknownEngine(String),
    /// A weight that is no number.
    #[error("weight `{name}` holds a value that is not finite; nothing was exported")]
    NotFinite { name: String },
    /// Shapes that do not belong together.
    #[error("weight `{name}`: {reason}")]
    Weight { name: String, reason: String },
    /// A draft vocabulary of another size than the head's.
    #[error(
        "the draft vocabulary has {len} of {target} tokens, the head {draft_vocab_size} of {vocab_size}; nothing was exported"
    )]
    Vocab { len: usize, target: usize, draft_vocab_size: usize, vocab_size: usize },
    /// A folder that holds something else than a head.
    #[error("{path} is there and is no head ({reason}); nothing was replaced, choose another export.out")]
    Occupied { path: PathBuf, reason: String },
    /// A file that is no head.
    #[error("{path}: {reason}")]
    File { path: PathBuf, reason: String },
}
