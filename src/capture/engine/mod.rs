//! What each engine's server wants to hear and how it answers.
//!
//! In: a [`Job`]. Out: a [`Call`] to send, and what the bytes that come back mean. Nothing here touches the network, so
//! the answers recorded from real servers in tests/wire are read by the very code that reads live ones.
//! Open `sglang.rs`, `vllm.rs`, `llama_cpp.rs`, one engine each; `metrics.rs` reads Prometheus text.

mod llama_cpp;
mod metrics;
mod sglang;
mod vllm;

pub use llama_cpp::LlamaCpp;
pub use sglang::Sglang;
pub use vllm::Vllm;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Draw, Job};
use crate::recipe::{EngineKind, Thinking};
use crate::target::Message;

/// One HTTP request: `GET` where there is no body, else `POST`.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    pub path: String,
    pub body: Option<Value>,
}

impl Call {
    fn get(path: &str) -> Self {
        Self { path: path.into(), body: None }
    }

    fn post(path: &str, body: Value) -> Self {
        Self { path: path.into(), body: Some(body) }
    }
}

/// What a server says of itself.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ServerFacts {
    /// Path or name of the model, as the server was started with.
    pub model: String,
    /// The name requests use.
    pub served_as: String,
    /// The engine's version, where it tells.
    pub version: Option<String>,
    /// Most tokens of prompt and answer together.
    pub context: usize,
    /// Tokens the KV cache holds.
    pub kv_tokens: Option<usize>,
    /// Requests the server runs at once at most.
    pub max_running: Option<usize>,
    /// Vocabulary size, where it tells.
    pub vocab_size: Option<usize>,
    /// Bytes of KV cache a token takes, measured by the server.
    pub kv_bytes_per_token: Option<f64>,
    /// Type of the KV cache as the server names it.
    pub kv_dtype: Option<String>,
    /// Share of the device's memory the server may take.
    pub memory_fraction: Option<f64>,
    /// GPUs a replica spans.
    pub gpus: Option<usize>,
    /// A second level of cache behind the device's.
    pub hierarchical_cache: Option<bool>,
}

/// How busy a server is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Load {
    pub running: usize,
    pub waiting: usize,
    /// Share of the KV cache in use, 0 to 1. May lag: SGLang renews it every few dozen steps.
    pub kv_use: Option<f64>,
    /// Requests ever thrown out of the running batch for want of cache, or those that are out now (SGLang).
    pub preempted: Option<u64>,
}

/// A whole answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// As sampled, the stop token included.
    pub output_ids: Vec<u32>,
    /// `stop` or `length`.
    pub finish_reason: String,
    /// The prompt's ids or their number as the server saw them, where it tells.
    pub prompt: Echo,
    /// Seconds in the server's queue, where it tells.
    pub queued_s: Option<f64>,
}

/// What a server says the prompt was.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Echo {
    #[default]
    Untold,
    Count(usize),
    Ids(Vec<u32>),
}

/// What has come of an answer so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Partial {
    pub answer: Answer,
    pub done: bool,
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The server will never take this request.
    #[error("{status}: {says}")]
    Never { status: u16, says: String },
    /// It may take it later.
    #[error("{status}: {says}")]
    Later { status: u16, says: String },
    /// The key is wrong or missing: no request will pass.
    #[error("{status}: {says}; set capture.api_key_env or capture.api_key_file")]
    Key { status: u16, says: String },
    /// Bytes that are no answer of this engine.
    #[error("not an answer of this engine: {0}")]
    Garbled(String),
}

/// A rendered prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rendered {
    Ids(Vec<u32>),
    /// Text that [`Engine::tokenize`] turns into ids.
    Text(String),
}

/// One engine's dialect.
pub trait Engine: Send + Sync {
    /// The recipe's word for it.
    fn name(&self) -> &'static str;
    /// Requests whose answers tell what the server is. The first must succeed.
    fn facts_calls(&self) -> Vec<Call>;
    /// Reads those answers; an absent one is `None`.
    ///
    /// # Errors
    /// When the first is not this engine's.
    fn facts(&self, bodies: &[Option<String>]) -> Result<ServerFacts, Refusal>;
    /// Requests any of which tells how busy the server is, best first.
    fn load_calls(&self) -> Vec<Call>;
    /// Reads one of those answers.
    fn load(&self, body: &str) -> Option<Load>;
    /// Longest prompt plus answer the server takes, given its context.
    fn room(&self, context: usize) -> usize {
        context
    }
    /// Asks for an answer.
    fn generate(&self, job: &Job, draw: &Draw, served_as: &str, stream: bool) -> Call;
    /// Reads a whole answer.
    ///
    /// # Errors
    /// When it is a refusal, or no answer at all.
    fn answer(&self, status: u16, body: &str) -> Result<Answer, Refusal>;
    /// Reads one event of a stream into what came before.
    ///
    /// # Errors
    /// As [`Engine::answer`].
    fn event(&self, data: &str, so_far: &mut Partial) -> Result<(), Refusal>;
    /// Takes a request back; engines without such a route notice the closed connection.
    fn abort(&self, _job: &str) -> Option<Call> {
        None
    }
    /// Asks for a text's ids.
    fn tokenize(&self, text: &str, served_as: &str) -> Call;
    /// Asks for a conversation's ids or text, as the model's own template writes it.
    fn render(&self, messages: &[Message], tools: Option<&Value>, thinking: Thinking, served_as: &str) -> Call;
    /// Reads an answer to [`Engine::render`] or [`Engine::tokenize`].
    ///
    /// # Errors
    /// When it is a refusal, or no answer at all.
    fn rendered(&self, status: u16, body: &str) -> Result<Rendered, Refusal>;
    /// Asks for the text of ids.
    fn detokenize(&self, ids: &[u32], served_as: &str) -> Call;
    /// Reads an answer to [`Engine::detokenize`].
    ///
    /// # Errors
    /// When it is a refusal, or no answer at all.
    fn text(&self, status: u16, body: &str) -> Result<String, Refusal>;
}

/// The dialect of an engine; `None` for the embedded one, which has no wire.
pub fn engine(kind: EngineKind) -> Option<Box<dyn Engine>> {
    match kind {
        EngineKind::Embedded => None,
        EngineKind::Sglang => Some(Box::new(Sglang)),
        EngineKind::Vllm => Some(Box::new(Vllm)),
        EngineKind::LlamaCpp => Some(Box::new(LlamaCpp)),
    }
}

/// A status that is not 200, with the server's words out of any of the shapes engines use.
fn refused(status: u16, body: &str) -> Refusal {
    let says = words(body);
    match status {
        401 | 403 => Refusal::Key { status, says },
        408 | 409 | 425 | 429 => Refusal::Later { status, says },
        400..=499 => Refusal::Never { status, says },
        _ => Refusal::Later { status, says },
    }
}

/// The message in an error body: `{"error": {"message"}}`, `{"error": text}`, `{"message"}`, `{"detail"}`, or plain text.
fn words(body: &str) -> String {
    let value: Value = serde_json::from_str(body).unwrap_or(Value::Null);
    let error = value.get("error").unwrap_or(&value);
    let text = [error.get("message"), value.get("message"), value.get("detail"), Some(error)]
        .into_iter()
        .flatten()
        .find_map(Value::as_str)
        .unwrap_or(body);
    let mut short: String = text.chars().take(600).collect();
    if short.len() < text.len() {
        short.push_str(" ...");
    }
    short
}

/// An error that stands where an answer should: inside a 200, or as an event of a stream.
fn error_inside(value: &Value) -> Option<Refusal> {
    let error = value.get("error").filter(|e| !e.is_null())?;
    let status = error.get("code").and_then(Value::as_u64).unwrap_or(500) as u16;
    Some(refused(status, &value.to_string()))
}

fn parse(body: &str) -> Result<Value, Refusal> {
    serde_json::from_str(body).map_err(|e| {
        let start: String = body.chars().take(80).collect();
        Refusal::Garbled(format!("{e} in `{start}`"))
    })
}

/// A list of token ids.
fn ids(value: Option<&Value>, name: &str) -> Result<Vec<u32>, Refusal> {
    let fail = || Refusal::Garbled(format!("no list of ids `{name}`"));
    let list = value.and_then(Value::as_array).ok_or_else(fail)?;
    list.iter().map(|v| v.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(fail)).collect()
}

fn number(value: &Value, key: &str) -> Option<usize> {
    value.get(key).and_then(Value::as_u64).map(|n| n as usize)
}

fn string(value: &Value, key: &str) -> Option<String> {
    value.get(key).and_then(Value::as_str).map(str::to_string)
}

/// `chat_template_kwargs` that switch thinking: models name the switch `thinking` or `enable_thinking`.
fn template_arguments(thinking: Thinking) -> Option<Value> {
    let on = match thinking {
        Thinking::Default => return None,
        Thinking::On => true,
        Thinking::Off => false,
    };
    Some(serde_json::json!({ "thinking": on, "enable_thinking": on }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A recorded answer: status and body.
    pub fn recorded(engine: &str, name: &str) -> (u16, String) {
        let path = format!("{}/tests/wire/{engine}/{name}.json", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let value: Value = serde_json::from_str(&text).unwrap();
        (value["status"].as_u64().unwrap() as u16, value["body"].as_str().unwrap().to_string())
    }

    /// Runs the events of a recorded stream through an engine.
    pub fn streamed(engine: &dyn Engine, body: &str) -> Result<Partial, Refusal> {
        let mut so_far = Partial::default();
        for data in body.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|d| *d != "[DONE]") {
            engine.event(data, &mut so_far)?;
        }
        Ok(so_far)
    }

    #[test]
    fn every_error_shape_gives_its_words() {
        for (body, says) in [
            (r#"{"error":{"message":"too long","code":400}}"#, "too long"),
            (r#"{"error":"unknown field"}"#, "unknown field"),
            (r#"{"object":"error","message":"queue full","code":503}"#, "queue full"),
            (r#"{"detail":"Not Found"}"#, "Not Found"),
            ("<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
            ("", ""),
        ] {
            assert_eq!(words(body), says);
        }
    }

    proptest! {
        /// No bytes a server can send bring a reader down.
        #[test]
        fn any_body_is_read_or_refused(body in ".{0,300}", status in 100u16..600, cut in 0usize..2000) {
            let engines: [&dyn Engine; 3] = [&Sglang, &Vllm, &LlamaCpp];
            let names = ["sglang", "vllm", "llama_cpp"];
            for (engine, name) in engines.iter().zip(names) {
                for body in [body.clone(), recorded(name, "single").1.chars().take(cut).collect()] {
                    let _ = engine.answer(status, &body);
                    let _ = engine.event(&body, &mut Partial::default());
                    let _ = engine.rendered(status, &body);
                    let _ = engine.text(status, &body);
                    let _ = engine.load(&body);
                    let _ = engine.facts(&[Some(body.clone()), Some(body.clone()), Some(body)]);
                }
            }
        }
    }
}
