//! Text to token ids and back, and messages to a prompt.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::Value as Gguf;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::{
    PreTokenizerWrapper, byte_level::ByteLevel, digits::Digits, sequence::Sequence, split::Split, split::SplitPattern,
};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, Tokenizer};

use super::TargetError;
use super::weights::read_json;

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    pub content: String,
    /// What else templates look at: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`.
    #[serde(flatten)]
    pub more: serde_json::Map<String, Value>,
}

impl Message {
    /// A turn of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), more: serde_json::Map::new() }
    }
}

/// What a prompt is rendered with beside its messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rendering<'a> {
    /// Functions the model may call, as the template wants them.
    pub tools: Option<&'a Value>,
    /// Tells the template to think or not; `None` leaves it to the model.
    pub thinking: Option<bool>,
}

/// A target's tokenizer with its chat template.
pub struct TargetTokenizer {
    path: PathBuf,
    tokenizer: Tokenizer,
    /// Empty when the target ships none.
    template: String,
    /// Text of the special tokens a template may name: `bos_token`, `eos_token`, ...
    named: HashMap<String, String>,
}

impl TargetTokenizer {
    /// Reads tokenizer.json, and the template from chat_template.jinja or tokenizer_config.json.
    ///
    /// # Errors
    /// When tokenizer.json is missing or torn.
    pub fn from_folder(folder: &Path) -> Result<Self, TargetError> {
        let path = folder.join("tokenizer.json");
        let fail = |reason: String| TargetError::Tokenizer { path: path.clone(), reason };
        if !path.is_file() {
            return Err(fail("is not there; the embedded engine needs the tokenizer.json form".into()));
        }
        let tokenizer = Tokenizer::from_file(&path).map_err(|e| fail(e.to_string()))?;
        let config_path = folder.join("tokenizer_config.json");
        let config = if config_path.is_file() { read_json(&config_path)? } else { Value::Null };
        let template_path = folder.join("chat_template.jinja");
        let template = match std::fs::read_to_string(&template_path) {
            Ok(text) => text,
            Err(_) => template_of(&config),
        };
        let named = ["bos_token", "eos_token", "pad_token", "unk_token"]
            .into_iter()
            .filter_map(|name| {
                let value = config.get(name)?;
                let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str))?;
                Some((name.to_string(), text.to_string()))
            })
            .collect();
        Ok(Self { path: folder.to_path_buf(), tokenizer, template, named })
    }

    /// Rebuilds the byte-level BPE tokenizer that a GGUF file stores.
    ///
    /// # Errors
    /// When the file stores another kind, or its lists are torn.
    pub fn from_gguf(meta: &HashMap<String, Gguf>, path: &Path) -> Result<Self, TargetError> {
        let fail = |reason: String| TargetError::Tokenizer { path: path.to_path_buf(), reason };
        let text = |key: &str| meta.get(key).and_then(|v| v.to_string().ok()).map(String::as_str);
        let list = |key: &str| {
            let list = meta.get(key).and_then(|v| v.to_vec().ok());
            list.ok_or_else(|| fail(format!("no list `{key}`")))
        };
        match text("tokenizer.ggml.model") {
            Some("gpt2") => {}
            other => {
                let kind = other.unwrap_or("none");
                return Err(fail(format!("kind `{kind}` cannot be rebuilt from GGUF; use the Hugging Face folder")));
            }
        }
        let strings = |key: &str| -> Result<Vec<String>, TargetError> {
            list(key)?.iter().map(|v| v.to_string().cloned().map_err(|e| fail(format!("`{key}`: {e}")))).collect()
        };
        let tokens = strings("tokenizer.ggml.tokens")?;
        let merges: Vec<(String, String)> = strings("tokenizer.ggml.merges")?
            .iter()
            .map(|merge| {
                let pair = merge.split_once(' ').ok_or_else(|| fail(format!("merge `{merge}` is not a pair")))?;
                Ok((pair.0.to_string(), pair.1.to_string()))
            })
            .collect::<Result<_, TargetError>>()?;
        let pre = text("tokenizer.ggml.pre").unwrap_or("default");
        let (pre_tokenizer, ignore_merges) = pre_tokenizer(pre).ok_or_else(|| {
            fail(format!("pre-tokenizer `{pre}` cannot be rebuilt from GGUF; use the Hugging Face folder"))
        })?;
        let vocab: HashMap<String, u32> = tokens.iter().enumerate().map(|(id, t)| (t.clone(), id as u32)).collect();
        let model = BPE::builder()
            .vocab_and_merges(vocab.into_iter().collect::<tokenizers::models::bpe::Vocab>(), merges)
            .ignore_merges(ignore_merges)
            .build()
            .map_err(|e| fail(e.to_string()))?;
        let mut tokenizer = Tokenizer::new(model);
        tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
        tokenizer.with_decoder(Some(ByteLevel::default()));
        // llama.cpp's token types: 3 is control (special), 4 is user-defined.
        let kinds = list("tokenizer.ggml.token_type")?;
        let of_kind = |wanted: i32| -> Vec<AddedToken> {
            let pairs = tokens.iter().zip(kinds);
            let chosen = pairs.filter(|(_, kind)| kind.to_i32().is_ok_and(|kind| kind == wanted));
            chosen.map(|(token, _)| AddedToken::from(token.clone(), wanted == 3).normalized(false)).collect()
        };
        tokenizer.add_special_tokens(of_kind(3)).map_err(|e| fail(e.to_string()))?;
        tokenizer.add_tokens(of_kind(4)).map_err(|e| fail(e.to_string()))?;
        let named = [("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")]
            .into_iter()
            .filter_map(|(name, key)| {
                let id = meta.get(&format!("tokenizer.ggml.{key}_token_id"))?.to_u32().ok()?;
                Some((name.to_string(), tokens.get(id as usize)?.clone()))
            })
            .collect();
        let template = text("tokenizer.chat_template").unwrap_or("").to_string();
        Ok(Self { path: path.to_path_buf(), tokenizer, template, named })
    }

    /// Token ids of a text; special tokens written out in it become their ids, none is added.
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TargetError> {
        let encoding = self.tokenizer.encode_fast(text, false);
        let fail = |e: tokenizers::Error| TargetError::Tokenizer { path: self.path.clone(), reason: e.to_string() };
        Ok(encoding.map_err(fail)?.get_ids().to_vec())
    }

    /// Text of token ids, special tokens written out.
    ///
    /// # Errors
    /// When the tokenizer cannot decode them.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TargetError> {
        let fail = |e: tokenizers::Error| TargetError::Tokenizer { path: self.path.clone(), reason: e.to_string() };
        self.tokenizer.decode(ids, false).map_err(fail)
    }

    /// Text of token ids, special tokens left out.
    ///
    /// # Errors
    /// When the tokenizer cannot decode them.
    pub fn decode_plain(&self, ids: &[u32]) -> Result<String, TargetError> {
        let fail = |e: tokenizers::Error| TargetError::Tokenizer { path: self.path.clone(), reason: e.to_string() };
        self.tokenizer.decode(ids, true).map_err(fail)
    }

    /// Whether the target ships a chat template.
    pub fn has_template(&self) -> bool {
        !self.template.is_empty()
    }

    /// The id of one token by its text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Ids of the special tokens, ascending.
    pub fn special_ids(&self) -> Vec<u32> {
        let added = self.tokenizer.get_added_tokens_decoder();
        let mut ids: Vec<u32> = added.into_iter().filter(|(_, token)| token.special).map(|(id, _)| id).collect();
        ids.sort_unstable();
        ids
    }

    /// The prompt that asks for the next assistant turn, as the chat template writes it.
    ///
    /// # Errors
    /// When there is no template, or it refuses the messages.
    pub fn render(&self, messages: &[Message], rendering: Rendering) -> Result<String, TargetError> {
        let fail = |reason: String| TargetError::Template { path: self.path.clone(), reason };
        if self.template.is_empty() {
            return Err(fail("the target ships none".into()));
        }
        let mut environment = Environment::new();
        // What transformers sets for chat templates.
        let whitespace = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(whitespace.map_err(|e| fail(e.to_string()))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        let mut render = || {
            environment.add_template("chat", &self.template)?;
            let mut values = serde_json::json!({ "messages": messages, "add_generation_prompt": true });
            for (name, text) in &self.named {
                values[name] = Value::from(text.as_str());
            }
            if let Some(tools) = rendering.tools {
                values["tools"] = tools.clone();
            }
            if let Some(on) = rendering.thinking {
                // Models name the switch one way or the other.
                values["thinking"] = on.into();
                values["enable_thinking"] = on.into();
            }
            environment.get_template("chat")?.render(minijinja::value::Serde(values))
        };
        render().map_err(|e| fail(format!("{e:#}")))
    }

    /// [`TargetTokenizer::render`] and [`TargetTokenizer::encode`] in one.
    ///
    /// # Errors
    /// As those two.
    pub fn prompt_ids(&self, messages: &[Message], rendering: Rendering) -> Result<Vec<u32>, TargetError> {
        self.encode(&self.render(messages, rendering)?)
    }
}

/// The template in tokenizer_config.json: a text, or a list of named ones with `default` among them.
fn template_of(config: &Value) -> String {
    match config.get("chat_template") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(named)) => {
            let of = |name: &str| named.iter().find(|t| t.get("name").and_then(Value::as_str) == Some(name));
            let chosen = of("default").or(named.first());
            chosen.and_then(|t| t.get("template")).and_then(Value::as_str).unwrap_or("").to_string()
        }
        _ => String::new(),
    }
}

/// How text is cut before BPE, by llama.cpp's name for it, and whether whole words in the vocabulary skip the merges.
fn pre_tokenizer(name: &str) -> Option<(PreTokenizerWrapper, bool)> {
    let bytes = |regex| PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, regex));
    let split = |pattern: &str| {
        let split = Split::new(SplitPattern::Regex(pattern.into()), SplitDelimiterBehavior::Isolated, false).ok()?;
        Some(PreTokenizerWrapper::Sequence(Sequence::new(vec![PreTokenizerWrapper::Split(split), bytes(false)])))
    };
    match name {
        "default" | "gpt-2" | "gpt2" => Some((bytes(true), false)),
        "smollm" => {
            let parts = vec![PreTokenizerWrapper::Digits(Digits::new(true)), bytes(true)];
            Some((PreTokenizerWrapper::Sequence(Sequence::new(parts)), false))
        }
        "llama-bpe" => {
            let pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
            Some((split(pattern)?, true))
        }
        "qwen2" => {
            let pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
            Some((split(pattern)?, false))
        }
        _ => None,
    }
}
