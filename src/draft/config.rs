//! The shape of a draft head.

use std::collections::BTreeMap;

use crate::recipe::DraftRecipe;
use crate::target::{Rope, RopeScaling, TargetConfig};

/// Everything that decides a head's weights and its arithmetic.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftConfig {
    pub hidden_size: usize,
    pub target_hidden_size: usize,
    pub intermediate_size: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub rms_norm_eps: f64,
    pub rope: Rope,
    pub max_position_embeddings: usize,
    /// The target's vocabulary.
    pub vocab_size: usize,
    pub draft_vocab_size: usize,
    /// The fused layers, by the index of the layer the residual stream enters, ascending.
    pub aux_layers: Vec<usize>,
    /// The residual is the normed feature rather than the raw one.
    pub norm_before_residual: bool,
    /// One RMSNorm over all fused layers before `fc`.
    pub norm_before_fc: bool,
    /// One RMSNorm for each fused layer before `fc`.
    pub fc_norm: bool,
    /// The next TTT step receives the normed output (EAGLE 3.1).
    pub norm_output: bool,
    pub bos_token_id: Option<u32>,
    pub eos_token_ids: Vec<u32>,
}

/// A shape that cannot be.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("draft.{key} is {value}: {reason}")]
    Shape { key: &'static str, value: usize, reason: String },
    #[error("norm_before_fc and fc_norm exclude one another: both norm what fc receives")]
    TwoNorms,
}

impl DraftConfig {
    /// The head that a recipe asks for on a target; what the recipe leaves at 0 is the target's.
    ///
    /// # Errors
    /// When heads do not divide or the draft vocabulary exceeds the target's.
    pub fn new(target: &TargetConfig, recipe: &DraftRecipe, aux_layers: &[usize]) -> Result<Self, ConfigError> {
        let or = |given: usize, default: usize| if given == 0 { default } else { given };
        let config = Self {
            hidden_size: target.hidden_size,
            target_hidden_size: target.hidden_size,
            intermediate_size: or(recipe.intermediate_size, target.intermediate_size),
            num_attention_heads: or(recipe.num_attention_heads, target.num_attention_heads),
            num_key_value_heads: or(recipe.num_key_value_heads, target.num_key_value_heads),
            head_dim: or(recipe.head_dim, target.head_dim),
            rms_norm_eps: target.rms_norm_eps,
            rope: target.rope.clone(),
            max_position_embeddings: target.max_position_embeddings,
            vocab_size: target.vocab_size,
            draft_vocab_size: recipe.vocab_size,
            aux_layers: aux_layers.to_vec(),
            norm_before_residual: recipe.norm_before_residual,
            norm_before_fc: recipe.norm_before_fc,
            fc_norm: recipe.fc_norm,
            norm_output: recipe.norm_output,
            bos_token_id: target.bos_token_id,
            eos_token_ids: target.eos_token_ids.clone(),
        };
        let wrong = |key, value, reason: String| Err(ConfigError::Shape { key, value, reason });
        if config.num_attention_heads % config.num_key_value_heads != 0 {
            let reason = format!("it must divide the {} attention heads", config.num_attention_heads);
            return wrong("num_key_value_heads", config.num_key_value_heads, reason);
        }
        if config.head_dim % 2 == 1 {
            return wrong("head_dim", config.head_dim, "it must be even".into());
        }
        if config.draft_vocab_size > config.vocab_size {
            let reason = format!("the target has only {} tokens", config.vocab_size);
            return wrong("vocab_size", config.draft_vocab_size, reason);
        }
        if config.norm_before_fc && config.fc_norm {
            return Err(ConfigError::TwoNorms);
        }
        Ok(config)
    }

    /// Every weight's name and shape, as checkpoints store them.
    pub fn tensor_shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let (h, t, f) = (self.hidden_size, self.target_hidden_size, self.intermediate_size);
        let layers = self.aux_layers.len();
        let (q, kv) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let mut shapes: BTreeMap<String, Vec<usize>> = [
            ("fc.weight", vec![h, layers * t]),
            ("midlayer.self_attn.q_proj.weight", vec![q, 2 * h]),
            ("midlayer.self_attn.k_proj.weight", vec![kv, 2 * h]),
            ("midlayer.self_attn.v_proj.weight", vec![kv, 2 * h]),
            ("midlayer.self_attn.o_proj.weight", vec![h, q]),
            ("midlayer.mlp.gate_proj.weight", vec![f, h]),
            ("midlayer.mlp.up_proj.weight", vec![f, h]),
            ("midlayer.mlp.down_proj.weight", vec![h, f]),
            ("midlayer.input_layernorm.weight", vec![h]),
            ("midlayer.hidden_norm.weight", vec![h]),
            ("midlayer.post_attention_layernorm.weight", vec![h]),
            ("norm.weight", vec![h]),
            ("lm_head.weight", vec![self.draft_vocab_size, h]),
        ]
        .into_iter()
        .map(|(name, shape)| (name.to_string(), shape))
        .collect();
        if self.norm_before_fc {
            shapes.insert("input_norm.weight".into(), vec![layers * t]);
        }
        if self.fc_norm {
            shapes.extend((0..layers).map(|i| (format!("fc_norm.{i}.weight"), vec![t])));
        }
        shapes
    }
}

/// A shape of nothing, to be filled in.
impl Default for DraftConfig {
    fn default() -> Self {
        Self {
            hidden_size: 0,
            target_hidden_size: 0,
            intermediate_size: 0,
            num_attention_heads: 0,
            num_key_value_heads: 0,
            head_dim: 0,
            rms_norm_eps: 1e-5,
            rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
            max_position_embeddings: 2048,
            vocab_size: 0,
            draft_vocab_size: 0,
            aux_layers: Vec::new(),
            norm_before_residual: false,
            norm_before_fc: false,
            fc_norm: false,
            norm_output: false,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
        }
    }
}
