//! config.json of a served head, and what each engine makes of it.
//!
//! Layer ids stand in two places that different engines read. vLLM and llama.cpp read the top level, as layers the
//! residual stream enters. SGLang reads only `eagle_config`, and for Llama-like targets adds one to what it finds
//! there (it means layers the stream leaves); for DeepSeek-like targets it takes them as they are.

use serde_json::{Value, json};

use super::ExportError;
use crate::draft::config::DraftConfig;
use crate::target::{Rope, RopeScaling};

/// The options of a head that each engine cannot honour: engine, option, whether the head has it, why.
fn limits(config: &DraftConfig) -> [(&'static str, &'static str, bool, &'static str); 4] {
    [
        ("sglang", "norm_before_residual", config.norm_before_residual, "it always adds the raw feature"),
        ("llama.cpp", "fc_norm", config.fc_norm, "its converter does not know those weights"),
        ("llama.cpp", "norm_output", config.norm_output, "its converter drops the flag"),
        ("sglang", "num_attention_heads that the key/value heads do not divide", config.num_attention_heads % config.num_key_value_heads.max(1) != 0, "it has no such attention"),
    ]
}

/// Refuses what one of the engines would silently get wrong.
///
/// # Errors
/// Names the engine, the option and why.
pub fn check_engines(config: &DraftConfig, engines: &[String]) -> Result<(), ExportError> {
    for (engine, option, present, why) in limits(config) {
        if present && engines.iter().any(|e| e == engine) {
            return Err(ExportError::Engine { engine, option, why });
        }
    }
    Ok(())
}

/// config.json for a head on a target of `target_type` (its `model_type`).
pub fn to_json(config: &DraftConfig, target_type: &str) -> Value {
    let ids = &config.aux_layers;
    let left = matches!(target_type, "llama" | "mistral" | "qwen2" | "qwen3");
    let sglang_ids: Vec<i64> = ids.iter().map(|&id| id as i64 - i64::from(left)).collect();
    let mut json = json!({
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "target_model_type": target_type,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": false,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "mlp_bias": false,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "use_cache": true,
        "num_aux_hidden_states": ids.len(),
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {
            "use_aux_hidden_state": true,
            "eagle_aux_hidden_state_layer_ids": sglang_ids,
        },
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "torch_dtype": "bfloat16",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": match config.eos_token_ids.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            many => json!(many),
        },
    });
    // transformers 5 reads `rope_parameters`, earlier versions `rope_theta` beside `rope_scaling`; both say the same.
    let mut parameters = rope_json(&config.rope.scaling);
    json["rope_theta"] = json!(config.rope.theta);
    json["rope_scaling"] = if config.rope.scaling == RopeScaling::None { Value::Null } else { parameters.clone() };
    parameters["rope_theta"] = json!(config.rope.theta);
    json["rope_parameters"] = parameters;
    json
}

fn rope_json(scaling: &RopeScaling) -> Value {
    match scaling {
        RopeScaling::None => json!({"rope_type": "default"}),
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor, "original_max_position_embeddings": original_max_position,
        }),
        RopeScaling::Yarn { factor, original_max_position, beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim } => {
            let mut json = json!({
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original_max_position,
                "beta_fast": beta_fast, "beta_slow": beta_slow,
            });
            for (key, value) in [("attention_factor", attention_factor), ("mscale", mscale), ("mscale_all_dim", mscale_all_dim)] {
                if let Some(value) = value {
                    json[key] = json!(value);
                }
            }
            json
        }
    }
}

/// Reads a config.json: ours, the EAGLE authors', or speculators' with its nested layer.
///
/// # Errors
/// Says which key is missing or wrong.
pub fn from_json(json: &Value) -> Result<DraftConfig, String> {
    let speculators = json.get("transformer_layer_config").filter(|v| v.is_object());
    let layer = speculators.unwrap_or(json);
    let size_in = |from: &Value, key: &str| match from.get(key).filter(|v| !v.is_null()) {
        None => Ok(None),
        Some(value) => match value.as_u64() {
            Some(n) if n > 0 && n < 1 << 31 => Ok(Some(n as usize)),
            _ => Err(format!("`{key}` is {value}, not a positive whole number")),
        },
    };
    let need = |from: &Value, key: &str| size_in(from, key)?.ok_or(format!("no `{key}`"));
    if need(layer, "num_hidden_layers").is_ok_and(|n| n != 1) {
        return Err("more than one layer; only one-layer heads are portable, and only those are read".into());
    }
    if json.get("attention_bias").or_else(|| layer.get("attention_bias")).and_then(Value::as_bool) == Some(true) {
        return Err("`attention_bias` is true; heads with biases are not supported".into());
    }
    let hidden_size = need(layer, "hidden_size")?;
    let num_attention_heads = need(layer, "num_attention_heads")?;
    let num_key_value_heads = size_in(layer, "num_key_value_heads")?.unwrap_or(num_attention_heads);
    let vocab_size = need(layer, "vocab_size")?;
    let list = |value: &Value| -> Option<Vec<i64>> { value.as_array()?.iter().map(Value::as_i64).collect() };
    let top = json.get("eagle_aux_hidden_state_layer_ids").and_then(list);
    let nested = json.get("eagle_config").and_then(|c| c.get("eagle_aux_hidden_state_layer_ids")).and_then(list);
    let ids = top.or(nested).ok_or("no `eagle_aux_hidden_state_layer_ids`: which layers it fuses is not known")?;
    let aux_layers: Vec<usize> = ids
        .iter()
        .map(|&id| usize::try_from(id).map_err(|_| format!("layer id {id} is negative")))
        .collect::<Result<_, _>>()?;
    if aux_layers.is_empty() || aux_layers.windows(2).any(|w| w[0] >= w[1]) {
        return Err(format!("layer ids {aux_layers:?} do not ascend"));
    }
    let eagle = json.get("eagle_config");
    let flag = |key: &str| {
        let given = json.get(key).or_else(|| eagle.and_then(|c| c.get(key))).and_then(Value::as_bool);
        // speculators leaves out what is at its own default.
        given.unwrap_or(key == "norm_before_residual" && speculators.is_some())
    };
    let ids = |key: &str| match json.get(key).or_else(|| layer.get(key)) {
        Some(Value::Array(list)) => list.iter().filter_map(|v| v.as_u64().map(|n| n as u32)).collect(),
        Some(value) => value.as_u64().map(|n| n as u32).into_iter().collect::<Vec<u32>>(),
        None => Vec::new(),
    };
    if num_attention_heads % num_key_value_heads != 0 {
        return Err("the attention heads are not a multiple of the key/value heads".into());
    }
    Ok(DraftConfig {
        hidden_size,
        target_hidden_size: size_in(json, "target_hidden_size")?.unwrap_or(hidden_size),
        intermediate_size: need(layer, "intermediate_size")?,
        num_attention_heads,
        num_key_value_heads,
        head_dim: size_in(layer, "head_dim")?.unwrap_or(hidden_size / num_attention_heads),
        rms_norm_eps: layer.get("rms_norm_eps").and_then(Value::as_f64).unwrap_or(1e-6),
        rope: rope_of(layer)?,
        max_position_embeddings: size_in(layer, "max_position_embeddings")?.unwrap_or(2048),
        vocab_size,
        draft_vocab_size: size_in(json, "draft_vocab_size")?.unwrap_or(vocab_size),
        aux_layers,
        norm_before_residual: flag("norm_before_residual"),
        norm_before_fc: flag("norm_before_fc"),
        fc_norm: flag("fc_norm"),
        norm_output: flag("norm_output"),
        bos_token_id: ids("bos_token_id").first().copied(),
        eos_token_ids: ids("eos_token_id"),
    })
}

fn rope_of(layer: &Value) -> Result<Rope, String> {
    let given = ["rope_parameters", "rope_scaling"].iter().find_map(|key| layer.get(key).filter(|v| v.is_object()));
    let float = |key: &str| given.and_then(|g| g.get(key)).and_then(Value::as_f64);
    let theta = float("rope_theta").or_else(|| layer.get("rope_theta").and_then(Value::as_f64)).unwrap_or(10_000.0);
    let kind = given.and_then(|g| g.get("rope_type").or_else(|| g.get("type"))).and_then(Value::as_str);
    let need = |key: &str| float(key).ok_or(format!("RoPE scaling without `{key}`"));
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
            original_max_position: need("original_max_position_embeddings")? as usize,
            beta_fast: float("beta_fast").unwrap_or(32.0),
            beta_slow: float("beta_slow").unwrap_or(1.0),
            attention_factor: float("attention_factor"),
            mscale: float("mscale"),
            mscale_all_dim: float("mscale_all_dim"),
        },
        Some(other) => return Err(format!("RoPE scaling `{other}` is not supported")),
    };
    Ok(Rope { theta, scaling })
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn config() -> DraftConfig {
        DraftConfig {
            hidden_size: 8,
            target_hidden_size: 8,
            intermediate_size: 16,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 2,
            rms_norm_eps: 1e-5,
            vocab_size: 20,
            draft_vocab_size: 10,
            aux_layers: vec![2, 15, 27],
            bos_token_id: Some(1),
            eos_token_ids: vec![2],
            ..DraftConfig::default()
        }
    }

    #[test]
    fn a_written_config_is_read_back_and_says_each_engine_its_layers() {
        for scaling in [
            RopeScaling::None,
            RopeScaling::Yarn { factor: 64.0, original_max_position: 4096, beta_fast: 32.0, beta_slow: 1.0, attention_factor: None, mscale: Some(1.0), mscale_all_dim: Some(1.0) },
        ] {
            let config = DraftConfig { rope: Rope { theta: 50_000.0, scaling }, ..config() };
            let json = to_json(&config, "llama");
            assert_eq!(from_json(&json).unwrap(), config);
            assert_eq!(json["eagle_aux_hidden_state_layer_ids"], json!([2, 15, 27]));
            assert_eq!(json["eagle_config"]["eagle_aux_hidden_state_layer_ids"], json!([1, 14, 26]));
            assert_eq!(json["tie_word_embeddings"], json!(false));
            let kimi = to_json(&config, "kimi_k25");
            assert_eq!(kimi["eagle_config"]["eagle_aux_hidden_state_layer_ids"], json!([2, 15, 27]));
        }
    }

    #[test]
    fn what_an_engine_gets_wrong_is_refused_for_it_alone() {
        let config = DraftConfig { norm_before_residual: true, ..config() };
        let error = check_engines(&config, &["vllm".into(), "sglang".into()]).unwrap_err().to_string();
        assert!(error.contains("sglang") && error.contains("norm_before_residual"), "{error}");
        assert!(check_engines(&config, &["vllm".into()]).is_ok());
        let config = DraftConfig { norm_output: true, ..super::tests::config() };
        assert!(check_engines(&config, &["llama.cpp".into()]).is_err());
        assert!(check_engines(&config, &["vllm".into(), "sglang".into()]).is_ok());
    }

    #[test]
    fn speculators_defaults_are_its_own() {
        let json = json!({"transformer_layer_config": {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 4,
            "num_hidden_layers": 1, "vocab_size": 20, "rms_norm_eps": 1e-5, "rope_theta": 1e5}, "draft_vocab_size": 10,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3]});
        let config = from_json(&json).unwrap();
        assert!(config.norm_before_residual);
        assert_eq!((config.draft_vocab_size, config.vocab_size, config.rope.theta), (10, 20, 1e5));
        assert!(from_json(&json!({})).is_err());
        assert!(from_json(&json!([1])).is_err());
    }
}
