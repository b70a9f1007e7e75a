//! What can be wrong with a target.

use std::path::PathBuf;

/// What is wrong with a target's files, and where.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// Nothing at the path, or nothing that is a model.
    #[error(
        "{path}: no target here; give a folder with config.json and safetensors, or a GGUF file, or name `hub`/`pip` in [target] to fetch one"
    )]
    NotFound { path: PathBuf },
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    /// config.json or the GGUF metadata cannot be read as a model's.
    #[error("{path}: {reason}")]
    Config { path: PathBuf, reason: String },
    /// A model that the embedded engine does not run.
    #[error(
        "{path}: {what} is not supported by the embedded engine (it runs Llama, SmolLM2, Mistral, Qwen2 and Qwen3 dense models in F32, F16, BF16 or GGUF Q8_0, Q4_0, Q4_1, Q4_K, Q6_K)"
    )]
    Unsupported { path: PathBuf, what: String },
    /// A weight is absent or torn.
    #[error("{path}: tensor `{name}`: {reason}")]
    Tensor { path: PathBuf, name: String, reason: String },
    /// The tokenizer cannot be built.
    #[error("{path}: tokenizer: {reason}")]
    Tokenizer { path: PathBuf, reason: String },
    /// The chat template refuses the messages, or is missing.
    #[error("{path}: chat template: {reason}")]
    Template { path: PathBuf, reason: String },
    /// No source gave the weights.
    #[error("could not fetch the target into {path}:\n{}", tried.join("\n"))]
    Fetch { path: PathBuf, tried: Vec<String> },
    /// No such file in models/.
    #[error("models/ has no family `{name}`; the nearest is `{nearest}`, all are {known}")]
    Family { name: String, nearest: String, known: String },
}

impl TargetError {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        |source| Self::Io { path, source }
    }
}
