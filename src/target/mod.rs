//! The target model, embedded: files, tokenizer and a decoder-only engine in Burn.
//!
//! In: a Hugging Face folder or a GGUF file. Out: hidden states (prefill) and sampled tokens (generation).
//! Open `config.rs` for the shape, `weights.rs` for safetensors and GGUF, `tokenizer.rs` for ids and chat templates,
//! `fetch.rs` for the download, `model.rs` for the layers, `generate.rs` for decoding.

pub mod rope;

/// The shape of a decoder-only target.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetConfig {
    /// `llama`, `mistral`, `qwen2`, `qwen3`.
    pub model_type: String,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub rms_norm_eps: f64,
    pub rope: Rope,
    pub max_position_embeddings: usize,
    pub tie_word_embeddings: bool,
    /// q, k and v carry a bias (Qwen2).
    pub qkv_bias: bool,
    /// RMSNorm over each head of q and k (Qwen3).
    pub qk_norm: bool,
    pub bos_token_id: Option<u32>,
    pub eos_token_ids: Vec<u32>,
}

/// Rotary position embedding, rotate-half form over the whole head.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope { pub theta: f64, pub scaling: RopeScaling }

#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    None,
    Linear { factor: f64 },
    Llama3 { factor: f64, low_freq_factor: f64, high_freq_factor: f64, original_max_position: usize },
    Yarn { factor: f64, original_max_position: usize, beta_fast: f64, beta_slow: f64, attention_factor: Option<f64>, mscale: Option<f64>, mscale_all_dim: Option<f64> },
}

/// A weight on the host, float32, row-major.
pub struct HostTensor { pub shape: Vec<usize>, pub data: Vec<f32> }

/// Named weights under their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`), wherever they are stored.
pub trait WeightSource {
    /// # Errors
    /// When the tensor is absent, torn, or of a type that is not a float.
    fn tensor(&self, name: &str) -> Result<HostTensor, TargetError>;
    fn contains(&self, name: &str) -> bool;
}

#[derive(Debug, thiserror::Error)]
pub enum TargetError {}
