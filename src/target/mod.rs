//! The target model, embedded: files, tokenizer and a decoder-only engine in Burn.
//!
//! In: a Hugging Face folder or a GGUF file. Out: hidden states (prefill) and sampled tokens (generation).
//! Open `config.rs` for the shape, `weights.rs` for safetensors and GGUF, `tokenizer.rs` for ids and chat templates,
//! `fetch.rs` for the download, `family.rs` for what models/ adds, `model.rs` for the layers, `cache.rs` for the keys and
//! values of a batch, `generate.rs` for sampling and decoding.

pub mod cache;
pub mod config;
mod error;
pub mod family;
pub mod fetch;
pub mod generate;
mod gguf;
pub mod model;
pub mod rope;
pub mod tokenizer;
pub mod weights;

pub use config::TargetConfig;
pub use error::TargetError;
pub use model::TargetModel;
pub use tokenizer::{Message, Rendering, TargetTokenizer};
pub use weights::TargetFiles;

/// Rotary position embedding, rotate-half form over the whole head.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    pub theta: f64,
    pub scaling: RopeScaling,
}

/// How a checkpoint stretches its positions; the formulas stand in [`rope`].
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    None,
    Linear {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: usize,
    },
    Yarn {
        factor: f64,
        original_max_position: usize,
        beta_fast: f64,
        beta_slow: f64,
        attention_factor: Option<f64>,
        mscale: Option<f64>,
        mscale_all_dim: Option<f64>,
    },
}

/// A weight on the host, float32, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTensor {
    pub shape: Vec<usize>,
    pub data: Vec<f32>,
}

/// Named weights under their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`), wherever they are stored.
pub trait WeightSource {
    /// Reads one weight as float32.
    ///
    /// # Errors
    /// When the tensor is absent, torn, or of a type that is not a float.
    fn tensor(&self, name: &str) -> Result<HostTensor, TargetError>;
    /// Whether there is a weight of this name.
    fn contains(&self, name: &str) -> bool;
}
