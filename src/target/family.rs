//! What a checkpoint does not tell: one TOML file a family member, in models/.

use serde::Deserialize;

use super::{TargetConfig, TargetError};

/// A member of a target family.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Family {
    /// The file's name.
    pub name: String,
    /// Its Hugging Face hub repository.
    pub hub: String,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub vocab_size: usize,
    /// The fused layers, by the index of the layer the residual stream enters, ascending.
    pub fused_layers: Vec<usize>,
    /// Tokens that are always in the draft vocabulary.
    pub special_token_ids: Vec<u32>,
    /// Tokens around reasoning text, where the model thinks.
    pub reasoning: Option<Reasoning>,
    /// Tokens around calls of tools.
    pub tool_calls: Option<Reasoning>,
    /// Room the KV cache takes.
    pub kv: KvShape,
    /// A draft head that suits the model.
    pub draft: SuggestedDraft,
}

/// Tokens around reasoning text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reasoning {
    pub start: u32,
    pub end: u32,
}

/// What a token takes in the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvShape {
    /// Values a layer keeps of a token: keys and values of all KV heads, or MLA's latent with its rotary part.
    pub values_per_layer: usize,
    /// MLA's latent stands whole on every GPU of a tensor-parallel group, so that more GPUs give no more room.
    pub replicated: bool,
}

impl Family {
    /// Bytes a token takes in the KV cache at so many bytes a value.
    pub fn kv_bytes_per_token(&self, bytes_per_value: usize) -> usize {
        self.kv.values_per_layer * self.num_hidden_layers * bytes_per_value
    }
}

/// A draft head's shape.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SuggestedDraft {
    pub intermediate_size: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub vocab_size: usize,
}

const FILES: [(&str, &str); 5] = [
    ("kimi-k2.5", include_str!("../../models/kimi-k2.5.toml")),
    ("deepseek-v3", include_str!("../../models/deepseek-v3.toml")),
    ("qwen3-8b", include_str!("../../models/qwen3-8b.toml")),
    ("llama-3.1-8b", include_str!("../../models/llama-3.1-8b.toml")),
    ("smollm2-135m", include_str!("../../models/smollm2-135m.toml")),
];

impl Family {
    /// The member of this name.
    ///
    /// # Errors
    /// When models/ has none; names the nearest.
    pub fn named(name: &str) -> Result<Self, TargetError> {
        let found = FILES.iter().find(|(known, _)| *known == name).and_then(|(_, text)| toml::from_str(text).ok());
        found.ok_or_else(|| {
            let likeness = |known: &str| strsim::jaro_winkler(known, name);
            let nearest = FILES.iter().max_by(|a, b| likeness(a.0).total_cmp(&likeness(b.0)));
            TargetError::Family {
                name: name.into(),
                nearest: nearest.map_or("", |(known, _)| known).into(),
                known: FILES.map(|(known, _)| known).join(", "),
            }
        })
    }

    /// Whether a target is this member: a recipe that names the wrong family would fuse the wrong layers.
    ///
    /// # Errors
    /// Names the first size that differs.
    pub fn check(&self, config: &TargetConfig) -> Result<(), TargetError> {
        let pairs = [
            ("hidden size", self.hidden_size, config.hidden_size),
            ("number of layers", self.num_hidden_layers, config.num_hidden_layers),
            ("vocabulary", self.vocab_size, config.vocab_size),
        ];
        match pairs.iter().find(|(_, ours, theirs)| ours != theirs) {
            None => Ok(()),
            Some((what, ours, theirs)) => Err(TargetError::Config {
                path: format!("models/{}.toml", self.name).into(),
                reason: format!("{what} is {ours}, the target's {theirs}: target.family names another model"),
            }),
        }
    }

    /// Special and reasoning tokens, ascending.
    pub fn always(&self) -> Vec<u32> {
        let mut ids = self.special_token_ids.clone();
        ids.extend(self.reasoning.iter().flat_map(|r| [r.start, r.end]));
        ids.sort_unstable();
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_whole() {
        for (name, text) in FILES {
            let family: Family = toml::from_str(text).unwrap();
            assert_eq!(family.name, name);
            assert!(family.fused_layers.windows(2).all(|w| w[0] < w[1]), "{name}");
            assert!(family.fused_layers.iter().all(|&l| l <= family.num_hidden_layers), "{name}");
            assert!(family.always().iter().all(|&id| (id as usize) < family.vocab_size), "{name}");
            assert_eq!(family.draft.num_attention_heads % family.draft.num_key_value_heads, 0, "{name}");
        }
        // MLA: (512 + 64) values a layer over 61 layers, two bytes each; vLLM reports 70,276 on eight GPUs.
        assert_eq!(Family::named("kimi-k2.5").unwrap().kv_bytes_per_token(2), 70_272);
        assert_eq!(Family::named("smollm2-135m").unwrap().kv_bytes_per_token(2), 23_040);
        let error = Family::named("kimi-k2").unwrap_err().to_string();
        assert!(error.contains("kimi-k2.5"), "{error}");
    }
}
