//! Messages to the ids the target sees: by its own chat template and tokenizer, or by the server's.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::CaptureError;
use super::engine::{Refusal, Rendered};
use super::http::{Failure, Server};
use super::journal::Lines;
use super::prompts::{Content, Prompt};
use crate::recipe::Thinking;
use crate::target::{Message, Rendering, TargetTokenizer};

/// Who renders.
pub enum Renderer {
    /// The target's own files.
    Tokenizer(Box<TargetTokenizer>),
    /// The server's template and tokenizer: for models with a tiktoken file or a template in Python.
    Server(Box<Server>),
}

/// A prompt's ids, or why there are none.
pub type PromptIds = Result<Arc<Vec<u32>>, String>;

/// Prompts rendered by a server at once.
const AT_ONCE: usize = 32;

/// A line of rendered.jsonl: a server renders a prompt once, whatever restarts.
#[derive(Serialize, Deserialize)]
struct Kept {
    /// Hash of the messages and of how they are rendered.
    key: String,
    ids: Vec<u32>,
}

impl Renderer {
    /// The word for it in run.json.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Tokenizer(_) => "tokenizer",
            Self::Server(_) => "server",
        }
    }

    /// Renders every prompt, in order. What a server renders is kept in `folder`.
    ///
    /// # Errors
    /// When a server stops answering or the file cannot be written. A prompt the template refuses is an inner error.
    pub async fn all(
        &self,
        prompts: &[Prompt],
        thinking: Thinking,
        folder: &Path,
    ) -> Result<Vec<PromptIds>, CaptureError> {
        let Self::Server(server) = self else { return Ok(self.local(prompts, thinking)) };
        let mut kept: HashMap<String, Arc<Vec<u32>>> = HashMap::new();
        let mut lines = Lines::open(&folder.join("rendered.jsonl"), |k: Kept| {
            kept.insert(k.key, Arc::new(k.ids));
        })?;
        let keys: Vec<String> = prompts.iter().map(|p| key(&p.content, thinking, &server.facts.model)).collect();
        let mut rendered: Vec<Option<PromptIds>> = keys.iter().map(|key| kept.get(key).cloned().map(Ok)).collect();
        let wanted: Vec<usize> = (0..prompts.len()).filter(|&i| rendered[i].is_none()).collect();
        let bar = crate::progress::bar(wanted.len() as u64, "render {wide_bar} {pos}/{len} prompts  {eta} left");
        let mut answers = stream::iter(wanted)
            .map(|i| async move { (i, remote(server, &prompts[i].content, thinking).await) })
            .buffer_unordered(AT_ONCE);
        while let Some((i, answer)) = answers.next().await {
            let answer = match answer {
                Ok(ids) => Ok(Arc::new(ids)),
                Err(Failure::Refused(Refusal::Never { says, .. })) => Err(says),
                Err(failure) => {
                    let reason = format!("it does not render prompts: {failure}");
                    return Err(CaptureError::Server { url: server.url.clone(), reason });
                }
            };
            if let Ok(ids) = &answer {
                lines.append(&Kept { key: keys[i].clone(), ids: ids.to_vec() })?;
            }
            rendered[i] = Some(answer);
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(rendered.into_iter().flatten().collect())
    }

    /// Renders every prompt with the target's own files, in order; a server's prompts are refused.
    pub fn local(&self, prompts: &[Prompt], thinking: Thinking) -> Vec<PromptIds> {
        match self {
            Self::Tokenizer(tokenizer) => prompts.par_iter().map(|p| local(tokenizer, &p.content, thinking)).collect(),
            Self::Server(_) => prompts.iter().map(|_| Err("the target's own tokenizer is needed".into())).collect(),
        }
    }

    /// Renders one conversation.
    ///
    /// # Errors
    /// What the template or the server said.
    pub async fn one(&self, messages: &[Message], tools: Option<&Value>, thinking: Thinking) -> PromptIds {
        let content = Content::Messages { messages: messages.to_vec(), tools: tools.cloned() };
        match self {
            Self::Tokenizer(tokenizer) => local(tokenizer, &content, thinking),
            Self::Server(server) => {
                remote(server, &content, thinking).await.map(Arc::new).map_err(|failure| failure.to_string())
            }
        }
    }

    /// The text of an answer as a turn of history shows it, special tokens left out.
    ///
    /// # Errors
    /// What the tokenizer or the server said.
    pub async fn text(&self, ids: &[u32]) -> Result<String, String> {
        match self {
            Self::Tokenizer(tokenizer) => tokenizer.decode_plain(ids).map_err(|e| e.to_string()),
            Self::Server(server) => {
                let call = server.engine.detokenize(ids, &server.facts.served_as);
                let (status, body) = server.call(&call, Duration::from_secs(60)).await.map_err(|e| e.to_string())?;
                server.engine.text(status, &body).map_err(|e| e.to_string())
            }
        }
    }
}

fn local(tokenizer: &TargetTokenizer, content: &Content, thinking: Thinking) -> PromptIds {
    let thinking = match thinking {
        Thinking::Default => None,
        Thinking::On => Some(true),
        Thinking::Off => Some(false),
    };
    match content {
        Content::Ids(ids) => Ok(Arc::new(ids.clone())),
        Content::Messages { messages, tools } => {
            let rendering = Rendering { tools: tools.as_ref(), thinking };
            tokenizer.prompt_ids(messages, rendering).map(Arc::new).map_err(|e| e.to_string())
        }
    }
}

async fn remote(server: &Server, content: &Content, thinking: Thinking) -> Result<Vec<u32>, Failure> {
    let limit = Duration::from_secs(60);
    let (messages, tools) = match content {
        Content::Ids(ids) => return Ok(ids.clone()),
        Content::Messages { messages, tools } => (messages, tools),
    };
    let name = &server.facts.served_as;
    let call = server.engine.render(messages, tools.as_ref(), thinking, name);
    let mut tries = 0;
    let (status, body) = loop {
        match server.call(&call, limit).await {
            Err(Failure::Connection(_) | Failure::Idle(_)) if tries < 4 => {
                tries += 1;
                tokio::time::sleep(Duration::from_millis(500 << tries)).await;
            }
            other => break other?,
        }
    };
    match server.engine.rendered(status, &body)? {
        Rendered::Ids(ids) => Ok(ids),
        Rendered::Text(text) => {
            let (status, body) = server.call(&server.engine.tokenize(&text, name), limit).await?;
            match server.engine.rendered(status, &body)? {
                Rendered::Ids(ids) => Ok(ids),
                Rendered::Text(_) => Err(Refusal::Garbled("text where ids were asked for".into()).into()),
            }
        }
    }
}

fn key(content: &Content, thinking: Thinking, model: &str) -> String {
    let mut hash = Sha256::new();
    hash.update(format!("{model} {thinking:?} {content:?}"));
    hash.finalize().iter().take(12).map(|byte| format!("{byte:02x}")).collect()
}
