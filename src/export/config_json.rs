//! config.json of a served head.
//!
//! Layer ids stand in two places that different engines read. vLLM and llama.cpp read the top level, as layers the
//! residual stream enters. SGLang reads only `eagle_config`, where it means layers the stream leaves for most targets
//! ([`sglang_shifts`]). RoPE stands in two forms: transformers 5, vLLM and llama.cpp read `rope_parameters`, older
//! versions and SGLang `rope_theta` beside `rope_scaling`.

use serde_json::{Value, json};

pub use super::engines::check_engines;
use super::engines::sglang_shifts;
use crate::draft::config::{ConfigError, DraftConfig};
use crate::target::{Rope, RopeScaling};

/// A larger vocabulary is taken for a damaged file, before memory is asked for it.
const MOST_TOKENS: usize = 1 << 24;

/// config.json for a head on a target of `target_type` (its `model_type`).
pub fn to_json(config: &DraftConfig, target_type: &str) -> Value {
    let ids = &config.aux_layers;
    let shift = i64::from(sglang_shifts(target_type));
    let sglang_ids: Vec<i64> = ids.iter().map(|&id| id as i64 - shift).collect();
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
        RopeScaling::Yarn {
            factor,
            original_max_position,
            beta_fast,
            beta_slow,
            attention_factor,
            mscale,
            mscale_all_dim,
        } => {
            let mut json = json!({
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original_max_position,
                "beta_fast": beta_fast, "beta_slow": beta_slow,
            });
            for (key, value) in
                [("attention_factor", attention_factor), ("mscale", mscale), ("mscale_all_dim", mscale_all_dim)]
            {
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
/// Layer ids are those of the top level; where only `eagle_config` has some, these, read as vLLM does (layers the
/// stream enters).
///
/// # Errors
/// Says which key is missing or wrong.
pub fn from_json(json: &Value) -> Result<DraftConfig, String> {
    if !json.is_object() {
        return Err("is no JSON object".into());
    }
    let speculators = json.get("transformer_layer_config").filter(|v| v.is_object());
    let layer = speculators.unwrap_or(json);
    if let Some(algorithm) = json.get("speculators_model_type").and_then(Value::as_str).filter(|&a| a != "eagle3") {
        return Err(format!("`speculators_model_type` is `{algorithm}`; only `eagle3` heads are read"));
    }
    let size_in = |from: &Value, key: &str| match from.get(key).filter(|v| !v.is_null()) {
        None => Ok(None),
        Some(value) => match value.as_u64() {
            Some(n) if n > 0 && n < 1 << 31 => Ok(Some(n as usize)),
            _ => Err(format!("`{key}` is {value}, not a positive whole number")),
        },
    };
    let need = |from: &Value, key: &str| size_in(from, key)?.ok_or(format!("no `{key}`"));
    let given = |key: &str| json.get(key).filter(|v| !v.is_null()).or_else(|| layer.get(key).filter(|v| !v.is_null()));
    if size_in(layer, "num_hidden_layers")?.is_some_and(|layers| layers != 1) {
        return Err("more than one layer; only one-layer heads are portable, and only those are read".into());
    }
    for key in ["attention_bias", "mlp_bias"] {
        if given(key).and_then(Value::as_bool) == Some(true) {
            return Err(format!("`{key}` is true; heads with biases are not supported"));
        }
    }
    if let Some(activation) = given("hidden_act").filter(|&v| v != "silu") {
        return Err(format!("`hidden_act` is {activation}; only `silu` is supported"));
    }
    if let Some(scale) = given("logit_scale").filter(|v| v.as_f64() != Some(1.0)) {
        return Err(format!("`logit_scale` is {scale}; only 1 is supported"));
    }
    let hidden_size = need(layer, "hidden_size")?;
    let num_attention_heads = need(layer, "num_attention_heads")?;
    let vocab_size = need(layer, "vocab_size")?;
    if vocab_size > MOST_TOKENS {
        return Err(format!("`vocab_size` is {vocab_size}, more than any target has"));
    }
    let eagle = json.get("eagle_config").filter(|v| v.is_object());
    let aux_layers = layer_ids(json)?.or(eagle.map(layer_ids).transpose()?.flatten()).ok_or(
        "no `eagle_aux_hidden_state_layer_ids`: which layers the head fuses is not known. Engines then take \
         [2, n/2, n-3] of the target's n layers; if that is right, write those three into config.json",
    )?;
    // speculators leaves out what is at its own default.
    let own = |key: &str| json.get(key).and_then(Value::as_bool);
    let norm_before_residual = own("norm_before_residual").unwrap_or(speculators.is_some());
    // vLLM looks for this one in eagle_config first.
    let nested_norm = eagle.and_then(|c| c.get("norm_before_fc")).and_then(Value::as_bool);
    let tokens = |key: &str| -> Vec<u32> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        match given(key) {
            Some(Value::Array(list)) => list.iter().filter_map(id).collect(),
            Some(value) => id(value).into_iter().collect(),
            None => Vec::new(),
        }
    };
    let rms_norm_eps = match layer.get("rms_norm_eps").filter(|v| !v.is_null()) {
        None => 1e-6,
        Some(value) => value.as_f64().ok_or(format!("`rms_norm_eps` is {value}, not a number"))?,
    };
    let config = DraftConfig {
        hidden_size,
        target_hidden_size: size_in(json, "target_hidden_size")?.unwrap_or(hidden_size),
        intermediate_size: need(layer, "intermediate_size")?,
        num_attention_heads,
        num_key_value_heads: size_in(layer, "num_key_value_heads")?.unwrap_or(num_attention_heads),
        head_dim: size_in(layer, "head_dim")?.unwrap_or(hidden_size / num_attention_heads),
        rms_norm_eps,
        rope: Rope::from_json(layer)?,
        max_position_embeddings: size_in(layer, "max_position_embeddings")?.unwrap_or(2048),
        vocab_size,
        draft_vocab_size: size_in(json, "draft_vocab_size")?.unwrap_or(vocab_size),
        aux_layers,
        norm_before_residual,
        norm_before_fc: nested_norm.or(own("norm_before_fc")).unwrap_or(false),
        fc_norm: own("fc_norm").unwrap_or(false),
        norm_output: own("norm_output").unwrap_or(false),
        bos_token_id: tokens("bos_token_id").first().copied(),
        eos_token_ids: tokens("eos_token_id"),
    };
    match config.check() {
        Ok(()) => Ok(config),
        // The recipe has no say here.
        Err(ConfigError::Layers { layers, reason }) => {
            Err(format!("`eagle_aux_hidden_state_layer_ids` {layers:?}: {reason}"))
        }
        Err(error) => Err(error.to_string()),
    }
}

/// `eagle_aux_hidden_state_layer_ids` of one object; `None` where it is absent, null or empty.
fn layer_ids(from: &Value) -> Result<Option<Vec<usize>>, String> {
    let key = "eagle_aux_hidden_state_layer_ids";
    let Some(value) = from.get(key).filter(|v| !v.is_null()) else { return Ok(None) };
    let id = |value: &Value| value.as_u64().filter(|&id| id < 1 << 16).map(|id| id as usize);
    let ids: Option<Vec<usize>> = value.as_array().and_then(|list| list.iter().map(id).collect());
    let ids = ids.ok_or(format!("`{key}` is {value}, not a list of layers"))?;
    Ok(Some(ids).filter(|ids| !ids.is_empty()))
}

/// What a reader of the file should know of its layer ids: where they stand, and whether engines agree on them.
pub(super) fn layer_note(json: &Value) -> Option<String> {
    let list = |from: &Value| -> Option<Vec<i64>> {
        let ids = from.get("eagle_aux_hidden_state_layer_ids")?.as_array()?;
        ids.iter().map(Value::as_i64).collect::<Option<Vec<i64>>>().filter(|ids| !ids.is_empty())
    };
    match (list(json), json.get("eagle_config").and_then(list)) {
        (None, Some(nested)) => Some(format!(
            "layer ids stand only in eagle_config: {nested:?} are read as layers the stream enters, as vLLM does; \
             SGLang adds one to them on most targets"
        )),
        (Some(top), Some(nested)) => {
            let left: Vec<i64> = top.iter().map(|id| id - 1).collect();
            (nested != top && nested != left).then(|| {
                format!("layer ids differ: {top:?} at the top level, which are taken, and {nested:?} in eagle_config")
            })
        }
        _ => None,
    }
}

/// Whether two heads have the same shape. Decimal text may cost a float its last bit, so floats may differ by that.
pub(super) fn same_shape(a: &DraftConfig, b: &DraftConfig) -> bool {
    fn same(a: &Value, b: &Value) -> bool {
        match (a, b) {
            (Value::Object(a), Value::Object(b)) => {
                a.len() == b.len() && a.iter().all(|(key, value)| b.get(key).is_some_and(|other| same(value, other)))
            }
            (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
            (Value::Number(x), Value::Number(y)) if x.is_f64() && y.is_f64() => match (x.as_f64(), y.as_f64()) {
                (Some(x), Some(y)) => (x - y).abs() <= 1e-12 * x.abs(),
                _ => false,
            },
            _ => a == b,
        }
    }
    same(&to_json(a, ""), &to_json(b, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> DraftConfig {
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

    fn scalings() -> Vec<RopeScaling> {
        vec![
            RopeScaling::None,
            RopeScaling::Linear { factor: 2.5 },
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position: 8192,
            },
            RopeScaling::Yarn {
                factor: 64.0,
                original_max_position: 4096,
                beta_fast: 32.0,
                beta_slow: 1.0,
                attention_factor: None,
                mscale: Some(1.0),
                mscale_all_dim: Some(1.0),
            },
        ]
    }

    #[test]
    fn a_written_config_is_read_back_and_says_each_engine_its_layers() {
        for scaling in scalings() {
            let config = DraftConfig { rope: Rope { theta: 50_000.0, scaling }, ..config() };
            let json = to_json(&config, "llama");
            assert_eq!(from_json(&json).unwrap(), config);
            assert_eq!(json["eagle_aux_hidden_state_layer_ids"], json!([2, 15, 27]));
            assert_eq!(json["eagle_config"]["eagle_aux_hidden_state_layer_ids"], json!([1, 14, 26]));
            assert_eq!(json["tie_word_embeddings"], json!(false));
            assert_eq!(json["num_aux_hidden_states"], json!(3));
            let kimi = to_json(&config, "kimi_k25");
            assert_eq!(kimi["eagle_config"]["eagle_aux_hidden_state_layer_ids"], json!([2, 15, 27]));
            assert_eq!(layer_note(&json).or(layer_note(&kimi)), None);
        }
    }

    #[test]
    fn rope_stands_in_both_forms() {
        for scaling in scalings() {
            let plain = scaling == RopeScaling::None;
            let json = to_json(&DraftConfig { rope: Rope { theta: 5e4, scaling }, ..config() }, "llama");
            assert_eq!(json["rope_theta"], json!(5e4));
            assert_eq!(json["rope_parameters"]["rope_theta"], json!(5e4));
            assert_eq!(json["rope_scaling"].is_null(), plain);
            if !plain {
                assert_eq!(json["rope_scaling"]["rope_type"], json["rope_parameters"]["rope_type"]);
                assert_eq!(json["rope_scaling"]["factor"], json["rope_parameters"]["factor"]);
            }
        }
    }

    #[test]
    fn decimal_text_does_not_make_another_shape() {
        // Both of 1e-5 as a float32 and its neighbours survive or come back one bit off; a real change does not pass.
        let eps = f64::from(1e-5f32);
        let near = DraftConfig { rms_norm_eps: f64::from_bits(eps.to_bits() + 1), ..config() };
        assert!(same_shape(&DraftConfig { rms_norm_eps: eps, ..config() }, &near));
        assert!(!same_shape(&config(), &near));
        assert!(!same_shape(&config(), &DraftConfig { fc_norm: true, ..config() }));
        assert!(!same_shape(&config(), &DraftConfig { aux_layers: vec![2, 15, 26], ..config() }));
    }

    /// speculators' nesting, without the keys at its defaults.
    fn speculators() -> Value {
        json!({
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 4,
                "num_hidden_layers": 1, "vocab_size": 20, "rms_norm_eps": 1e-5, "rope_theta": 1e5},
            "draft_vocab_size": 10, "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        })
    }

    #[test]
    fn speculators_defaults_are_its_own() {
        let config = from_json(&speculators()).unwrap();
        assert!(config.norm_before_residual);
        assert_eq!((config.draft_vocab_size, config.vocab_size, config.rope.theta), (10, 20, 1e5));
        let mut json = speculators();
        json["norm_before_residual"] = json!(false);
        assert!(!from_json(&json).unwrap().norm_before_residual);
    }

    #[test]
    fn layer_ids_of_eagle_config_are_taken_where_no_others_are() {
        let mut json = to_json(&config(), "llama");
        json["eagle_aux_hidden_state_layer_ids"] = Value::Null;
        assert_eq!(from_json(&json).unwrap().aux_layers, [1, 14, 26]);
        assert!(layer_note(&json).unwrap().contains("SGLang adds one"));
        json["eagle_aux_hidden_state_layer_ids"] = json!([3, 4, 5]);
        assert_eq!(from_json(&json).unwrap().aux_layers, [3, 4, 5]);
        assert!(layer_note(&json).unwrap().contains("differ"));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let says = |change: &dyn Fn(&mut Value), wanted: &str| {
            let mut json = to_json(&config(), "llama");
            change(&mut json);
            let error = from_json(&json).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        };
        says(&|j| *j = json!([1]), "no JSON object");
        says(&|j| *j = json!({}), "hidden_size");
        says(&|j| j["hidden_size"] = json!(-8), "hidden_size");
        says(&|j| j["hidden_size"] = json!("8"), "hidden_size");
        says(&|j| j["num_hidden_layers"] = json!(2), "more than one layer");
        says(&|j| j["num_key_value_heads"] = json!(3), "num_key_value_heads");
        says(&|j| j["head_dim"] = json!(3), "head_dim");
        says(&|j| j["draft_vocab_size"] = json!(21), "draft_vocab_size");
        says(&|j| j["vocab_size"] = json!(2_000_000_000), "more than any target");
        says(&|j| j["target_hidden_size"] = json!(16), "target_hidden_size");
        says(&|j| j["attention_bias"] = json!(true), "attention_bias");
        says(&|j| j["hidden_act"] = json!("gelu"), "hidden_act");
        says(&|j| j["logit_scale"] = json!(2), "logit_scale");
        says(&|j| j["eagle_aux_hidden_state_layer_ids"] = json!([2, 1, 3]), "ascend");
        says(&|j| j["eagle_aux_hidden_state_layer_ids"] = json!([-1, 1, 3]), "not a list of layers");
        says(&|j| j["eagle_aux_hidden_state_layer_ids"] = json!("2,3"), "not a list of layers");
        says(&|j| j["rope_parameters"]["rope_type"] = json!("longrope"), "longrope");
        says(&|j| j["rope_parameters"]["rope_theta"] = json!("big"), "rope_theta");
        says(&|j| j["rope_parameters"]["rope_theta"] = json!(0), "rope_theta");
        says(&|j| j["rope_parameters"]["rope_type"] = json!("yarn"), "factor");
        says(&|j| j["partial_rotary_factor"] = json!(0.5), "partial_rotary_factor");
        says(&|j| j["rms_norm_eps"] = json!([]), "rms_norm_eps");
        let no_layers = |j: &mut Value| {
            j["eagle_aux_hidden_state_layer_ids"] = Value::Null;
            j["eagle_config"] = Value::Null;
        };
        says(&no_layers, "[2, n/2, n-3]");
        let dflash = |j: &mut Value| {
            *j = speculators();
            j["speculators_model_type"] = json!("dflash");
        };
        says(&dflash, "dflash");
    }
}
