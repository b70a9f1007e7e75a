//! The shape of a target, from config.json or from GGUF metadata.

use std::collections::HashMap;
use std::path::Path;

use candle_core::quantized::gguf_file::Value as Gguf;
use serde_json::Value;

use super::{Rope, RopeScaling, TargetError};

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
    /// The head's rows are the embedding's.
    pub tie_word_embeddings: bool,
    /// q, k and v carry a bias (Qwen2).
    pub qkv_bias: bool,
    /// RMSNorm over each head of q and k (Qwen3).
    pub qk_norm: bool,
    pub bos_token_id: Option<u32>,
    pub eos_token_ids: Vec<u32>,
}

impl TargetConfig {
    /// Layers of the residual stream a head is fused from where nobody names others: entering layers 2, n/2 and n-3
    /// (the EAGLE authors' choice, in vLLM's counting).
    pub fn default_layers(&self) -> Vec<usize> {
        let n = self.num_hidden_layers;
        let mut layers = vec![2.min(n), n / 2, n.saturating_sub(3)];
        layers.sort_unstable();
        layers.dedup();
        layers
    }

    /// Reads a Hugging Face config.json. `generation` is generation_config.json, whose stop tokens win: chat models
    /// list there the end of a turn that config.json lacks.
    ///
    /// # Errors
    /// When a key is missing or of another type, or the model is not one the engine runs.
    pub fn from_hugging_face(json: &Value, generation: Option<&Value>, path: &Path) -> Result<Self, TargetError> {
        let json = json.get("text_config").filter(|text| text.is_object()).unwrap_or(json);
        let fail = |reason: String| TargetError::Config { path: path.to_path_buf(), reason };
        let size = |key: &str| {
            let value = json.get(key).ok_or_else(|| fail(format!("no `{key}`")))?;
            let value = value.as_u64().filter(|&n| n > 0 && n < 1 << 32);
            value.map(|n| n as usize).ok_or_else(|| fail(format!("`{key}` is not a positive whole number")))
        };
        let model_type =
            json.get("model_type").and_then(Value::as_str).ok_or_else(|| fail("no `model_type`".into()))?;
        if !matches!(model_type, "llama" | "mistral" | "qwen2" | "qwen3") {
            return Err(unsupported(path, format!("model_type `{model_type}`")));
        }
        if let Some(quantization) = json.get("quantization_config").filter(|q| !q.is_null()) {
            let method = quantization.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
            return Err(unsupported(path, format!("quantization `{method}`")));
        }
        if json.get("use_sliding_window").and_then(Value::as_bool) == Some(true) {
            return Err(unsupported(path, "sliding-window attention".into()));
        }
        let optional = |key: &str| json.get(key).filter(|v| !v.is_null()).map(|_| size(key)).transpose();
        let hidden_size = size("hidden_size")?;
        let num_attention_heads = size("num_attention_heads")?;
        let max_position_embeddings = optional("max_position_embeddings")?.unwrap_or(2048);
        if let Some(window) = optional("sliding_window")?.filter(|_| model_type == "mistral")
            && window < max_position_embeddings
        {
            return Err(unsupported(path, format!("sliding-window attention over {window} tokens")));
        }
        let ids = |key: &str| {
            generation.and_then(|g| g.get(key)).filter(|v| !v.is_null()).or_else(|| json.get(key)).map(token_ids)
        };
        let config = Self {
            model_type: model_type.to_string(),
            vocab_size: size("vocab_size")?,
            hidden_size,
            intermediate_size: size("intermediate_size")?,
            num_hidden_layers: size("num_hidden_layers")?,
            num_attention_heads,
            num_key_value_heads: optional("num_key_value_heads")?.unwrap_or(num_attention_heads),
            head_dim: optional("head_dim")?.unwrap_or(hidden_size / num_attention_heads),
            rms_norm_eps: json.get("rms_norm_eps").and_then(Value::as_f64).unwrap_or(1e-6),
            rope: Rope::from_json(json).map_err(fail)?,
            max_position_embeddings,
            tie_word_embeddings: json.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false),
            qkv_bias: json.get("attention_bias").and_then(Value::as_bool).unwrap_or(model_type == "qwen2"),
            qk_norm: model_type == "qwen3",
            bos_token_id: ids("bos_token_id").and_then(|ids| ids.first().copied()),
            eos_token_ids: ids("eos_token_id").unwrap_or_default(),
        };
        config.check(path)?;
        Ok(config)
    }

    /// Reads the metadata of a GGUF file. `tensors` tells what only the list of tensors knows.
    ///
    /// # Errors
    /// As [`TargetConfig::from_hugging_face`].
    pub fn from_gguf(meta: &HashMap<String, Gguf>, tensors: &GgufFacts, path: &Path) -> Result<Self, TargetError> {
        let fail = |reason: String| TargetError::Config { path: path.to_path_buf(), reason };
        let architecture = meta.get("general.architecture").and_then(|v| v.to_string().ok());
        let architecture = architecture.ok_or_else(|| fail("no `general.architecture`".into()))?.clone();
        if !matches!(architecture.as_str(), "llama" | "qwen2" | "qwen3") {
            return Err(unsupported(path, format!("architecture `{architecture}`")));
        }
        let get = |key: &str| meta.get(&format!("{architecture}.{key}"));
        let size = |key: &str| {
            let value = get(key).ok_or_else(|| fail(format!("no `{architecture}.{key}`")))?;
            gguf_size(value).ok_or_else(|| fail(format!("`{architecture}.{key}` is not a positive whole number")))
        };
        let optional = |key: &str| get(key).map(|_| size(key)).transpose();
        let float = |key: &str| get(key).and_then(gguf_float);
        if optional("expert_count")?.is_some_and(|n| n > 0) {
            return Err(unsupported(path, "a mixture of experts".into()));
        }
        let hidden_size = size("embedding_length")?;
        let num_attention_heads = size("attention.head_count")?;
        let max_position_embeddings = size("context_length")?;
        let head_dim = optional("attention.key_length")?.unwrap_or(hidden_size / num_attention_heads);
        let theta = float("rope.freq_base").unwrap_or(10_000.0);
        let factor = float("rope.scaling.factor").unwrap_or(1.0);
        let original = optional("rope.scaling.original_context_length")?.unwrap_or(max_position_embeddings);
        let kind = get("rope.scaling.type").and_then(|v| v.to_string().ok()).map(String::as_str);
        let scaling = match (&tensors.rope_factors, kind) {
            (Some(factors), _) => llama3_scaling(factors, theta, head_dim)
                .ok_or_else(|| unsupported(path, "a table of RoPE factors that is not Llama 3's".into()))?,
            (None, None | Some("none")) => RopeScaling::None,
            (None, Some("linear")) => RopeScaling::Linear { factor },
            (None, Some("yarn")) => RopeScaling::Yarn {
                factor,
                original_max_position: original,
                beta_fast: 32.0,
                beta_slow: 1.0,
                attention_factor: None,
                mscale: None,
                mscale_all_dim: None,
            },
            (None, Some(other)) => return Err(unsupported(path, format!("RoPE scaling `{other}`"))),
        };
        let id = |key: &str| meta.get(key).and_then(gguf_size_or_zero).map(|n| n as u32);
        let mut eos_token_ids: Vec<u32> =
            ["eos", "eot", "eom"].iter().filter_map(|name| id(&format!("tokenizer.ggml.{name}_token_id"))).collect();
        eos_token_ids.dedup();
        let config = Self {
            model_type: architecture.clone(),
            vocab_size: tensors.vocab_size,
            hidden_size,
            intermediate_size: size("feed_forward_length")?,
            num_hidden_layers: size("block_count")?,
            num_attention_heads,
            num_key_value_heads: optional("attention.head_count_kv")?.unwrap_or(num_attention_heads),
            head_dim,
            // Stored as float32; shortest decimal that rounds to it gives back the 1e-5 of config.json.
            rms_norm_eps: float("attention.layer_norm_rms_epsilon").unwrap_or(1e-6),
            rope: Rope { theta, scaling },
            max_position_embeddings,
            tie_word_embeddings: !tensors.has_head,
            qkv_bias: tensors.has_qkv_bias,
            qk_norm: tensors.has_qk_norm,
            bos_token_id: id("tokenizer.ggml.bos_token_id"),
            eos_token_ids,
        };
        config.check(path)?;
        Ok(config)
    }

    fn check(&self, path: &Path) -> Result<(), TargetError> {
        let fail = |reason: &str| Err(TargetError::Config { path: path.to_path_buf(), reason: reason.into() });
        if self.head_dim == 0 || self.head_dim % 2 == 1 {
            return fail("the head width is not an even number");
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            return fail("the attention heads are not a multiple of the key/value heads");
        }
        if !(self.rms_norm_eps >= 0.0 && self.rope.theta > 0.0) {
            return fail("`rms_norm_eps` or the RoPE base is not a positive number");
        }
        Ok(())
    }
}

/// What the list of tensors in a GGUF file tells of the shape.
pub struct GgufFacts {
    pub vocab_size: usize,
    pub has_head: bool,
    pub has_qkv_bias: bool,
    pub has_qk_norm: bool,
    /// `rope_freqs.weight`, the divisor of each channel pair's frequency.
    pub rope_factors: Option<Vec<f32>>,
}

fn unsupported(path: &Path, what: String) -> TargetError {
    TargetError::Unsupported { path: path.to_path_buf(), what }
}

fn token_ids(value: &Value) -> Vec<u32> {
    let one = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Array(list) => list.iter().filter_map(one).collect(),
        other => one(other).into_iter().collect(),
    }
}

impl Rope {
    /// Reads the keys of a config.json, a target's or a draft's: transformers 5 writes `rope_parameters`, earlier
    /// versions `rope_theta` beside `rope_scaling`.
    ///
    /// # Errors
    /// Says which key is missing or wrong, or which scaling is not supported.
    pub fn from_json(json: &Value) -> Result<Self, String> {
        let given = ["rope_parameters", "rope_scaling"].iter().find_map(|key| json.get(key).filter(|v| v.is_object()));
        let float = |key: &str| given.and_then(|g| g.get(key)).and_then(Value::as_f64);
        // A theta that is there but no number must not become the default in silence.
        let theta = match given.and_then(|g| g.get("rope_theta")).or(json.get("rope_theta")).filter(|v| !v.is_null()) {
            None => 10_000.0,
            Some(value) => value.as_f64().ok_or(format!("`rope_theta` is {value}, not a number"))?,
        };
        let partial = given.and_then(|g| g.get("partial_rotary_factor")).or(json.get("partial_rotary_factor"));
        if let Some(partial) = partial.filter(|v| !v.is_null() && v.as_f64() != Some(1.0)) {
            return Err(format!("`partial_rotary_factor` is {partial}; only RoPE over whole heads is supported"));
        }
        let kind = given.and_then(|g| g.get("rope_type").or_else(|| g.get("type"))).and_then(Value::as_str);
        let need = |key: &str| float(key).ok_or(format!("RoPE scaling without `{key}`"));
        let original = || {
            let original = float("original_max_position_embeddings");
            let original = original.or_else(|| json.get("max_position_embeddings").and_then(Value::as_f64));
            original.map(|n| n as usize).ok_or("RoPE scaling without `original_max_position_embeddings`".to_string())
        };
        let scaling = match kind {
            None | Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: need("factor")? },
            Some("llama3") => RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_max_position: need("original_max_position_embeddings")? as usize,
            },
            Some("yarn") => RopeScaling::Yarn {
                factor: need("factor")?,
                original_max_position: original()?,
                beta_fast: float("beta_fast").unwrap_or(32.0),
                beta_slow: float("beta_slow").unwrap_or(1.0),
                attention_factor: float("attention_factor"),
                mscale: float("mscale"),
                mscale_all_dim: float("mscale_all_dim"),
            },
            Some(other) => return Err(format!("RoPE scaling `{other}` is not supported")),
        };
        Ok(Self { theta, scaling })
    }
}

/// Llama 3's parameters behind a table of divisors: the published models share all but the factor, which is the
/// largest divisor. `None` when the table is not what those parameters give.
fn llama3_scaling(factors: &[f32], theta: f64, head_dim: usize) -> Option<RopeScaling> {
    let factor = f64::from(factors.iter().copied().fold(1.0f32, f32::max)).round();
    let scaling =
        RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position: 8192 };
    let plain = super::rope::inverse_frequencies(&Rope { theta, scaling: RopeScaling::None }, head_dim);
    let scaled = super::rope::inverse_frequencies(&Rope { theta, scaling: scaling.clone() }, head_dim);
    let same = plain.len() == factors.len()
        && plain.iter().zip(&scaled).zip(factors).all(|((p, s), &f)| (p / s - f64::from(f)).abs() < 1e-3 * p / s);
    same.then_some(scaling)
}

fn gguf_size_or_zero(value: &Gguf) -> Option<usize> {
    let number = match value {
        Gguf::U8(n) => u64::from(*n),
        Gguf::U16(n) => u64::from(*n),
        Gguf::U32(n) => u64::from(*n),
        Gguf::U64(n) => *n,
        Gguf::I8(n) => u64::try_from(*n).ok()?,
        Gguf::I16(n) => u64::try_from(*n).ok()?,
        Gguf::I32(n) => u64::try_from(*n).ok()?,
        Gguf::I64(n) => u64::try_from(*n).ok()?,
        _ => return None,
    };
    u32::try_from(number).ok().map(|n| n as usize)
}

fn gguf_size(value: &Gguf) -> Option<usize> {
    gguf_size_or_zero(value).filter(|&n| n > 0)
}

fn gguf_float(value: &Gguf) -> Option<f64> {
    match value {
        // Through the shortest decimal: the file holds float32(1e-5), the model means 1e-5.
        Gguf::F32(x) => x.to_string().parse().ok(),
        Gguf::F64(x) => Some(*x),
        other => gguf_size(other).map(|n| n as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn smollm2() -> Value {
        json!({"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
               "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5,
               "rope_theta": 100000, "max_position_embeddings": 8192, "tie_word_embeddings": true,
               "bos_token_id": 1, "eos_token_id": 2})
    }

    #[test]
    fn a_llama_config_is_read() {
        let config = TargetConfig::from_hugging_face(&smollm2(), None, Path::new("config.json")).unwrap();
        assert_eq!((config.head_dim, config.num_key_value_heads, config.rope.theta), (64, 3, 100_000.0));
        assert_eq!(config.default_layers(), [2, 15, 27]);
        assert_eq!(config.eos_token_ids, [2]);
    }

    #[test]
    fn the_generation_config_knows_the_end_of_a_turn() {
        let generation = json!({"eos_token_id": [7, 9]});
        let config = TargetConfig::from_hugging_face(&smollm2(), Some(&generation), Path::new("c")).unwrap();
        assert_eq!(config.eos_token_ids, [7, 9]);
    }

    #[test]
    fn both_spellings_of_scaled_rope_are_read() {
        let mut old = smollm2();
        old["rope_scaling"] = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                     "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        let mut new = smollm2();
        new["rope_parameters"] = old["rope_scaling"].clone();
        new["rope_parameters"]["rope_theta"] = json!(100000.0);
        let read = |json: &Value| TargetConfig::from_hugging_face(json, None, Path::new("c")).unwrap().rope;
        assert_eq!(read(&old), read(&new));
        assert!(matches!(read(&old).scaling, RopeScaling::Llama3 { factor: 8.0, .. }));
    }

    #[test]
    fn what_the_engine_does_not_run_is_refused_by_name() {
        for (key, value, says) in [
            ("model_type", json!("mixtral"), "mixtral"),
            ("quantization_config", json!({"quant_method": "fp8"}), "fp8"),
            ("rope_scaling", json!({"rope_type": "longrope"}), "longrope"),
            ("hidden_size", json!("wide"), "hidden_size"),
            ("num_key_value_heads", json!(2), "multiple"),
        ] {
            let mut json = smollm2();
            json[key] = value;
            let error = TargetConfig::from_hugging_face(&json, None, Path::new("c")).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_table_of_llama3_divisors_gives_its_parameters_back() {
        let rope = Rope {
            theta: 500_000.0,
            scaling: RopeScaling::Llama3 {
                factor: 32.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position: 8192,
            },
        };
        let plain = super::super::rope::inverse_frequencies(&Rope { theta: 500_000.0, scaling: RopeScaling::None }, 64);
        let scaled = super::super::rope::inverse_frequencies(&rope, 64);
        let mut factors: Vec<f32> = plain.iter().zip(&scaled).map(|(p, s)| (p / s) as f32).collect();
        assert_eq!(llama3_scaling(&factors, 500_000.0, 64), Some(rope.scaling));
        factors[3] = 1.7;
        assert_eq!(llama3_scaling(&factors, 500_000.0, 64), None);
    }
}
