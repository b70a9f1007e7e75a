//! The shape of a draft head.

use std::collections::BTreeMap;

use crate::recipe::DraftRecipe;
use crate::target::{Rope, RopeScaling, TargetConfig};

/// Everything that decides a head's weights and its arithmetic.
///
/// Widths are numbers of channels. The attention is grouped: `num_attention_heads / num_key_value_heads` query heads
/// share a key/value head. Embeddings are the target's, so the head is as wide as the target.
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
    /// Positions that engines make room for; nothing in the arithmetic depends on it.
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
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// A size that is impossible or does not fit the others.
    #[error("{key} is {value}: {reason}")]
    Shape { key: String, value: usize, reason: String },
    /// Layers that cannot be fused.
    #[error("the fused layers are {layers:?}: {reason}; set features.layers")]
    Layers { layers: Vec<usize>, reason: String },
    /// A number that makes the arithmetic meaningless.
    #[error("{key} is {value}: {reason}")]
    Number { key: &'static str, value: f64, reason: &'static str },
    /// Two options that do the same thing twice.
    #[error("norm_before_fc and fc_norm exclude one another: both norm what fc receives; set one of them")]
    TwoNorms,
}

impl DraftConfig {
    /// The head that a recipe asks for on a target; what the recipe leaves at 0 is the target's. `aux_layers` are the
    /// three fused layers, by the index of the layer the stream enters.
    ///
    /// # Errors
    /// When heads do not divide, the draft vocabulary exceeds the target's, or the layers are not three that ascend
    /// from 1 to at most the target's number of layers.
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
        config.check().map_err(|error| match error {
            // Say it in the recipe's words.
            ConfigError::Shape { key, value, reason } => {
                let key = if key == "draft_vocab_size" { "vocab_size" } else { &key };
                ConfigError::Shape { key: format!("draft.{key}"), value, reason }
            }
            other => other,
        })?;
        let layers = |reason: String| Err(ConfigError::Layers { layers: aux_layers.to_vec(), reason });
        if aux_layers.len() != 3 {
            return layers("a head fuses three layers".into());
        }
        if aux_layers.iter().any(|&layer| layer > target.num_hidden_layers) {
            return layers(format!("the target has only {} layers", target.num_hidden_layers));
        }
        if config.norm_before_fc && config.fc_norm {
            return Err(ConfigError::TwoNorms);
        }
        Ok(config)
    }

    /// Checks what must hold for any head, ours or another trainer's.
    ///
    /// # Errors
    /// Names the first key that is impossible or does not fit the others.
    pub fn check(&self) -> Result<(), ConfigError> {
        let wrong =
            |key: &str, value, reason: &str| Err(ConfigError::Shape { key: key.into(), value, reason: reason.into() });
        let sizes = [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("vocab_size", self.vocab_size),
            ("draft_vocab_size", self.draft_vocab_size),
        ];
        if let Some((key, value)) = sizes.into_iter().find(|&(_, value)| value == 0) {
            return wrong(key, value, "it must be at least 1");
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let reason = format!("it must divide the {} attention heads", self.num_attention_heads);
            return wrong("num_key_value_heads", self.num_key_value_heads, &reason);
        }
        if self.head_dim % 2 == 1 {
            return wrong("head_dim", self.head_dim, "it must be even, RoPE turns pairs of channels");
        }
        if self.draft_vocab_size > self.vocab_size {
            let reason = format!("the target has only {} tokens", self.vocab_size);
            return wrong("draft_vocab_size", self.draft_vocab_size, &reason);
        }
        if self.target_hidden_size != self.hidden_size {
            let reason = format!(
                "the head is {} wide; it must be as wide as the target, whose embeddings it uses",
                self.hidden_size
            );
            return wrong("target_hidden_size", self.target_hidden_size, &reason);
        }
        let layers = |reason: &str| Err(ConfigError::Layers { layers: self.aux_layers.clone(), reason: reason.into() });
        if self.aux_layers.is_empty() {
            return layers("at least one is needed");
        }
        if self.aux_layers.windows(2).any(|pair| pair[0] >= pair[1]) {
            return layers("they must ascend, each once");
        }
        if self.aux_layers[0] == 0 {
            return layers("the stream entering layer 0 is the embedding, which engines do not hand out");
        }
        let positive = |key, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(ConfigError::Number { key, value, reason: "it must be a positive number" }),
        };
        positive("rms_norm_eps", self.rms_norm_eps)?;
        positive("rope_theta", self.rope.theta)?;
        match &self.rope.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => positive("the RoPE factor", *factor)?,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                positive("the RoPE factor", *factor)?;
                positive("low_freq_factor", *low_freq_factor)?;
                positive("original_max_position_embeddings", *original_max_position as f64)?;
                // The formula divides by the difference.
                if high_freq_factor.is_nan() || high_freq_factor <= low_freq_factor {
                    let reason = "it must be above low_freq_factor";
                    return Err(ConfigError::Number { key: "high_freq_factor", value: *high_freq_factor, reason });
                }
            }
            RopeScaling::Yarn { factor, original_max_position, beta_fast, beta_slow, attention_factor, .. } => {
                positive("the RoPE factor", *factor)?;
                positive("original_max_position_embeddings", *original_max_position as f64)?;
                positive("beta_fast", *beta_fast)?;
                positive("beta_slow", *beta_slow)?;
                positive("attention_factor", attention_factor.unwrap_or(1.0))?;
            }
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> TargetConfig {
        TargetConfig {
            model_type: "llama".into(),
            vocab_size: 100,
            hidden_size: 12,
            intermediate_size: 24,
            num_hidden_layers: 30,
            num_attention_heads: 6,
            num_key_value_heads: 2,
            head_dim: 2,
            rms_norm_eps: 1e-5,
            rope: Rope { theta: 1e4, scaling: RopeScaling::None },
            max_position_embeddings: 2048,
            tie_word_embeddings: true,
            qkv_bias: false,
            qk_norm: false,
            bos_token_id: Some(1),
            eos_token_ids: vec![2, 3],
        }
    }

    fn recipe() -> DraftRecipe {
        DraftRecipe { vocab_size: 40, ..DraftRecipe::default() }
    }

    #[test]
    fn zero_takes_the_targets_and_a_size_is_taken() {
        let recipe = DraftRecipe { num_key_value_heads: 3, norm_output: true, ..recipe() };
        let config = DraftConfig::new(&target(), &recipe, &[2, 15, 27]).unwrap();
        assert_eq!((config.num_attention_heads, config.num_key_value_heads, config.head_dim), (6, 3, 2));
        assert_eq!((config.intermediate_size, config.draft_vocab_size, config.norm_output), (24, 40, true));
        assert_eq!((config.bos_token_id, config.eos_token_ids.clone()), (Some(1), vec![2, 3]));
        assert_eq!(config.tensor_shapes()["fc.weight"], [12, 36]);
        assert_eq!(config.tensor_shapes()["midlayer.self_attn.k_proj.weight"], [6, 24]);
        assert!(DraftConfig::new(&target(), &DraftRecipe { vocab_size: 100, ..recipe }, &[1, 2, 30]).is_ok());
    }

    #[test]
    fn what_cannot_be_is_refused_in_the_recipes_words() {
        let says = |recipe: DraftRecipe, layers: &[usize], wanted: &str| {
            let error = DraftConfig::new(&target(), &recipe, layers).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        };
        let layers = [2, 15, 27];
        says(DraftRecipe { num_key_value_heads: 4, ..recipe() }, &layers, "draft.num_key_value_heads is 4");
        says(DraftRecipe { head_dim: 3, ..recipe() }, &layers, "draft.head_dim is 3");
        says(DraftRecipe { vocab_size: 101, ..recipe() }, &layers, "draft.vocab_size is 101: the target has only 100");
        says(DraftRecipe { vocab_size: 0, ..recipe() }, &layers, "draft.vocab_size is 0");
        says(DraftRecipe { norm_before_fc: true, fc_norm: true, ..recipe() }, &layers, "exclude one another");
        says(recipe(), &[2, 15], "three layers");
        says(recipe(), &[2, 27, 15], "ascend");
        says(recipe(), &[2, 2, 15], "ascend");
        says(recipe(), &[0, 2, 15], "embedding");
        says(recipe(), &[2, 15, 31], "only 30 layers");
    }

    #[test]
    fn numbers_that_break_the_arithmetic_are_refused() {
        let good = DraftConfig::new(&target(), &recipe(), &[2, 15, 27]).unwrap();
        let refused = |rope: Rope| assert!(DraftConfig { rope, ..good.clone() }.check().is_err());
        refused(Rope { theta: 0.0, scaling: RopeScaling::None });
        refused(Rope { theta: 1e4, scaling: RopeScaling::Linear { factor: f64::NAN } });
        let llama3 = |high_freq_factor| RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor,
            original_max_position: 8192,
        };
        refused(Rope { theta: 1e4, scaling: llama3(1.0) });
        assert_eq!(DraftConfig { rope: Rope { theta: 1e4, scaling: llama3(4.0) }, ..good.clone() }.check(), Ok(()));
        assert!(DraftConfig { rms_norm_eps: -1.0, ..good }.check().is_err());
    }
}
