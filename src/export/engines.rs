//! What vLLM, SGLang and llama.cpp make of a head: the options they cannot honour, and the numbering of layers.
//!
//! Read in vLLM 0.32 (`llama_eagle3.py`, `yarn_scaling_rope.py`), SGLang 0.5 (`llama_eagle3.py`,
//! `rotary_embedding/yarn.py`, `set_eagle3_layers_to_capture` of each model) and llama.cpp build 11434
//! (`conversion/llama.py`, `src/models/eagle3.cpp`, `src/llama-context.cpp`).

use super::ExportError;
use crate::draft::config::DraftConfig;
use crate::target::RopeScaling;

/// The engines by the names that `export.engines` takes.
pub const ENGINES: [&str; 3] = ["vllm", "sglang", "llama.cpp"];

/// Whether SGLang adds one to the ids it finds in `eagle_config`: it means there the layers a stream *leaves*, but for
/// DeepSeek's and Kimi's models, whose ids it takes as they are.
pub fn sglang_shifts(target_type: &str) -> bool {
    !is_deepseek_like(target_type)
}

fn is_deepseek_like(target_type: &str) -> bool {
    ["deepseek", "kimi_k2"].iter().any(|family| target_type.starts_with(family))
}

/// Refuses what one of the engines would silently get wrong.
///
/// # Errors
/// Names the engine, the option and why, or an engine that is not known.
pub fn check_engines(config: &DraftConfig, engines: &[String]) -> Result<(), ExportError> {
    if let Some(unknown) = engines.iter().find(|engine| !ENGINES.contains(&engine.as_str())) {
        return Err(ExportError::UnknownEngine(unknown.clone()));
    }
    let yarn = "a YaRN attention factor of its own";
    let limits = [
        ("sglang", "norm_before_residual", config.norm_before_residual, "it always adds the raw feature"),
        ("sglang", yarn, differs(config, sglang_attention_factor), "it reads mscale and mscale_all_dim alone"),
        ("llama.cpp", "fc_norm", config.fc_norm, "its converter does not know those weights"),
        ("llama.cpp", "norm_output", config.norm_output, "its converter drops the flag"),
        ("llama.cpp", "other than three fused layers", config.aux_layers.len() != 3, "it loads three"),
        (
            "llama.cpp",
            yarn,
            differs(config, llama_cpp_attention_factor),
            "its converter drops mscale, and multiplies attention_factor by the default factor",
        ),
    ];
    for (engine, option, present, why) in limits {
        if present && engines.iter().any(|wanted| wanted == engine) {
            return Err(ExportError::Engine { engine, option, why });
        }
    }
    Ok(())
}

/// Refuses what depends on the target's `model_type` too.
///
/// # Errors
/// As [`check_engines`].
pub fn check_target(config: &DraftConfig, target_type: &str, engines: &[String]) -> Result<(), ExportError> {
    if is_deepseek_like(target_type) && config.aux_layers.first() == Some(&1) && engines.iter().any(|e| e == "sglang") {
        return Err(ExportError::Engine {
            engine: "sglang",
            option: "fused layers that begin with 1 on a DeepSeek-like target",
            why: "it takes such ids for another numbering and adds one to each",
        });
    }
    Ok(())
}

/// What the engines do honour, but only from some version on or in some setting.
pub fn warnings(config: &DraftConfig, engines: &[String]) -> Vec<String> {
    let wanted = |name: &str| engines.iter().any(|engine| engine == name);
    let mut warnings = Vec::new();
    if wanted("sglang") {
        if config.norm_output || config.fc_norm {
            warnings.push("sglang: norm_output and fc_norm need a version with pull request 24663".into());
        }
        if config.norm_before_fc {
            warnings.push("sglang: norm_before_fc needs a version with pull request 32334".into());
        }
        if config.aux_layers.len() != 3 {
            warnings.push("sglang: older versions size fc for three layers and do not load this head".into());
        }
    }
    if wanted("vllm") && (config.norm_output || config.fc_norm) {
        warnings.push("vllm: versions with issue 42764 open ignore norm_output and fc_norm".into());
    }
    warnings
}

/// YaRN's parts that decide what cosines and sines are multiplied by.
struct Yarn {
    factor: f64,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
}

impl Yarn {
    fn scale(&self, mscale: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * mscale * self.factor.ln() + 1.0 }
    }

    /// Ours, transformers' and vLLM's.
    fn trained(&self) -> f64 {
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(given), ..) => given,
            (None, Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => self.scale(mscale) / self.scale(all),
            _ => self.scale(1.0),
        }
    }
}

fn sglang_attention_factor(yarn: &Yarn) -> f64 {
    match (yarn.mscale, yarn.mscale_all_dim) {
        (Some(mscale), Some(all)) => yarn.scale(mscale) / yarn.scale(all),
        _ => yarn.scale(1.0),
    }
}

fn llama_cpp_attention_factor(yarn: &Yarn) -> f64 {
    yarn.attention_factor.unwrap_or(1.0) * yarn.scale(1.0)
}

/// Whether an engine multiplies by something else than the head was trained with.
fn differs(config: &DraftConfig, engine: fn(&Yarn) -> f64) -> bool {
    let RopeScaling::Yarn { factor, attention_factor, mscale, mscale_all_dim, .. } = config.rope.scaling else {
        return false;
    };
    let yarn = Yarn { factor, attention_factor, mscale, mscale_all_dim };
    // Written so that a factor that is no number differs too.
    let same = (engine(&yarn) - yarn.trained()).abs() <= 1e-4 * yarn.trained().abs();
    !same
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Rope;

    fn config() -> DraftConfig {
        DraftConfig { aux_layers: vec![2, 15, 27], ..DraftConfig::default() }
    }

    fn engines(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    /// The engines that refuse.
    fn refusing(config: &DraftConfig) -> Vec<&'static str> {
        ENGINES.into_iter().filter(|engine| check_engines(config, &engines(&[engine])).is_err()).collect()
    }

    #[test]
    fn what_an_engine_gets_wrong_is_refused_for_it_alone() {
        assert!(refusing(&config()).is_empty());
        let residual = DraftConfig { norm_before_residual: true, ..config() };
        assert_eq!(refusing(&residual), ["sglang"]);
        let error = check_engines(&residual, &engines(&["vllm", "sglang"])).unwrap_err().to_string();
        assert!(error.contains("sglang") && error.contains("norm_before_residual"), "{error}");
        assert_eq!(refusing(&DraftConfig { norm_output: true, ..config() }), ["llama.cpp"]);
        assert_eq!(refusing(&DraftConfig { fc_norm: true, ..config() }), ["llama.cpp"]);
        assert_eq!(refusing(&DraftConfig { aux_layers: vec![2, 9, 15, 27], ..config() }), ["llama.cpp"]);
        let error = check_engines(&config(), &engines(&["vlm"])).unwrap_err().to_string();
        assert!(error.contains("vlm") && error.contains("llama.cpp"), "{error}");
    }

    #[test]
    fn a_yarn_factor_is_refused_where_the_engine_computes_another() {
        let yarn = |attention_factor, mscale, mscale_all_dim| DraftConfig {
            rope: Rope {
                theta: 5e4,
                scaling: RopeScaling::Yarn {
                    factor: 64.0,
                    original_max_position: 4096,
                    beta_fast: 32.0,
                    beta_slow: 1.0,
                    attention_factor,
                    mscale,
                    mscale_all_dim,
                },
            },
            ..config()
        };
        assert!(refusing(&yarn(None, None, None)).is_empty());
        // Kimi's: 1.0 in vLLM and SGLang, 1.416 in llama.cpp.
        assert_eq!(refusing(&yarn(None, Some(1.0), Some(1.0))), ["llama.cpp"]);
        assert_eq!(refusing(&yarn(Some(1.0), Some(1.0), Some(1.0))), ["llama.cpp"]);
        assert_eq!(refusing(&yarn(Some(1.2), None, None)), ["sglang", "llama.cpp"]);
        assert_eq!(refusing(&yarn(Some(f64::NAN), None, None)), ["sglang", "llama.cpp"]);
    }

    #[test]
    fn all_but_deepseeks_family_is_shifted() {
        for shifted in ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "glm4_moe"] {
            assert!(sglang_shifts(shifted), "{shifted}");
        }
        for plain in ["deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"] {
            assert!(!sglang_shifts(plain), "{plain}");
        }
        let from_one = DraftConfig { aux_layers: vec![1, 29, 57], ..config() };
        assert!(check_target(&from_one, "kimi_k25", &engines(&["vllm", "sglang"])).is_err());
        assert!(check_target(&from_one, "kimi_k25", &engines(&["vllm"])).is_ok());
        assert!(check_target(&from_one, "llama", &engines(&["sglang"])).is_ok());
    }

    #[test]
    fn options_of_newer_versions_are_warned_about() {
        let all = engines(&ENGINES);
        assert!(warnings(&config(), &all).is_empty());
        let warned = warnings(&DraftConfig { norm_output: true, norm_before_fc: true, ..config() }, &all);
        assert_eq!(warned.len(), 3, "{warned:?}");
        assert!(warnings(&DraftConfig { norm_output: true, ..config() }, &engines(&["llama.cpp"])).is_empty());
    }
}
