//! The wire: one server over HTTP, with time limits, keys, streams, and failures told apart.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use tokio::time::timeout;

use super::engine::{Answer, Call, Engine, Load, Partial, Refusal, Rendered, ServerFacts};
use super::{CaptureError, Draw, Job};
use crate::recipe::CaptureRecipe;

/// How long small questions (facts, load, tokens) may take.
const SMALL: Duration = Duration::from_secs(20);
/// How long a connection may take to stand.
const CONNECT: Duration = Duration::from_secs(10);

/// Why a request gave nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Failure {
    /// The server answered, and refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// No connection, or it broke.
    #[error("{0}")]
    Connection(String),
    /// Nothing came for so long.
    #[error("no byte came for {0:.0} s")]
    Idle(f64),
    /// The stream ended before the answer did.
    #[error("the answer broke off after {0} tokens")]
    BrokenOff(usize),
}

/// A server and the dialect it speaks.
#[derive(Clone)]
pub struct Server {
    pub url: String,
    pub engine: Arc<dyn Engine>,
    pub facts: ServerFacts,
    client: reqwest::Client,
}

/// What tells one model from another: a restarted server must still be this.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Identity {
    pub model: String,
    pub context: usize,
    pub vocab_size: Option<usize>,
    /// The ids of [`PROBE`]: another tokenizer gives others.
    pub probe: Vec<u32>,
}

/// A text that tokenizers cut differently.
pub const PROBE: &str = "Ünïcode 12345, naïve café; fn main() { println!(\"hi\"); } 東京 \t\n  ok";

/// The API key a recipe names, from the environment or a file; never from the recipe itself.
///
/// # Errors
/// When it is named but not there.
pub fn api_key(recipe: &CaptureRecipe) -> Result<Option<String>, CaptureError> {
    if let Some(name) = &recipe.api_key_env {
        let key = std::env::var(name).map_err(|_| {
            CaptureError::Nothing(format!("capture.api_key_env names `{name}`, but it is not set in the environment"))
        })?;
        return Ok(Some(key.trim().to_string()));
    }
    let read = |path: &Path| std::fs::read_to_string(path).map_err(CaptureError::io(path));
    Ok(recipe.api_key_file.as_deref().map(read).transpose()?.map(|key| key.trim().to_string()))
}

impl Server {
    /// Reaches a server and reads what it says of itself.
    ///
    /// # Errors
    /// When it does not answer, or not as this engine does.
    pub async fn connect(url: &str, engine: Arc<dyn Engine>, key: Option<&str>) -> Result<Self, CaptureError> {
        let fail = |reason: String| CaptureError::Server { url: url.to_string(), reason };
        // Only the first call installs it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut headers = HeaderMap::new();
        if let Some(key) = key {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
                .map_err(|_| fail("the API key holds characters that no header can".into()))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let client = reqwest::Client::builder()
            .default_headers(headers)
            .connect_timeout(CONNECT)
            // A long answer is silent for as long as it is queued; keep-alive tells a dead peer from a slow one.
            .tcp_keepalive(Duration::from_secs(30))
            .pool_max_idle_per_host(1024)
            .build()
            .map_err(|e| fail(e.to_string()))?;
        let mut server =
            Self { url: url.trim_end_matches('/').to_string(), engine, facts: ServerFacts::default(), client };
        server.facts = server.read_facts().await.map_err(|e| {
            fail(format!("{e}; is {} running there? Its base address is wanted, without /v1", server.engine.name()))
        })?;
        Ok(server)
    }

    /// Asks the server what it is.
    ///
    /// # Errors
    /// When it does not say.
    pub async fn read_facts(&self) -> Result<ServerFacts, Failure> {
        let mut bodies = Vec::new();
        for (i, call) in self.engine.facts_calls().iter().enumerate() {
            match self.call(call, SMALL).await {
                Ok((200, body)) => bodies.push(Some(body)),
                Ok((status, body)) if i == 0 => {
                    return Err(self.engine.answer(status.max(400), &body).unwrap_err().into());
                }
                Err(failure) if i == 0 => return Err(failure),
                _ => bodies.push(None),
            }
        }
        Ok(self.engine.facts(&bodies)?)
    }

    /// What tells this model from another.
    ///
    /// # Errors
    /// When the server does not answer.
    pub async fn identity(&self) -> Result<Identity, Failure> {
        let facts = self.read_facts().await?;
        let call = self.engine.tokenize(PROBE, &facts.served_as);
        let (status, body) = self.call(&call, SMALL).await?;
        // A server without a tokenizer route is known by its name alone.
        let probe = match self.engine.rendered(status, &body) {
            Ok(Rendered::Ids(ids)) => ids,
            _ => vec![],
        };
        Ok(Identity { model: facts.model, context: facts.context, vocab_size: facts.vocab_size, probe })
    }

    /// How busy the server is; `None` where it does not say.
    pub async fn load(&self) -> Option<Load> {
        for call in self.engine.load_calls() {
            if let Ok((200, body)) = self.call(&call, Duration::from_secs(5)).await
                && let Some(load) = self.engine.load(&body)
            {
                return Some(load);
            }
        }
        None
    }

    /// Sends a call and reads the whole answer.
    ///
    /// # Errors
    /// When there is none in time.
    pub async fn call(&self, call: &Call, limit: Duration) -> Result<(u16, String), Failure> {
        let work = async {
            let answer = self.request(call).send().await?;
            Ok::<_, reqwest::Error>((answer.status().as_u16(), answer.text().await?))
        };
        let done = timeout(limit, work).await.map_err(|_| Failure::Idle(limit.as_secs_f64()))?;
        done.map_err(|e| Failure::Connection(chain(&e)))
    }

    fn request(&self, call: &Call) -> reqwest::RequestBuilder {
        let url = format!("{}{}", self.url, call.path);
        match &call.body {
            None => self.client.get(url),
            Some(body) => self.client.post(url).json(body),
        }
    }

    /// Asks for an answer. `progress` hears the number of tokens so far, where the answer streams.
    ///
    /// # Errors
    /// When the server refuses, the connection breaks, or nothing comes for `idle`.
    pub async fn ask(
        &self,
        job: &Job,
        draw: &Draw,
        stream: bool,
        idle: Duration,
        progress: impl Fn(usize),
    ) -> Result<Answer, Failure> {
        let call = self.engine.generate(job, draw, &self.facts.served_as, stream);
        let late = |_| Failure::Idle(idle.as_secs_f64());
        let broken = |e: reqwest::Error| Failure::Connection(chain(&e));
        let answer = timeout(idle, self.request(&call).send()).await.map_err(late)?.map_err(broken)?;
        let status = answer.status().as_u16();
        let events =
            answer.headers().get("content-type").is_some_and(|t| t.as_bytes().starts_with(b"text/event-stream"));
        if !events {
            let body = timeout(idle, answer.text()).await.map_err(late)?.map_err(broken)?;
            return Ok(self.engine.answer(status, &body)?);
        }
        let mut bytes = answer.bytes_stream();
        let mut lines = EventLines::default();
        let mut so_far = Partial::default();
        loop {
            let chunk = match timeout(idle, bytes.next()).await.map_err(late)? {
                Some(Ok(chunk)) => chunk,
                // The last event may have come before the break.
                _ if so_far.done => return Ok(so_far.answer),
                Some(Err(e)) => return Err(broken(e)),
                None => return Err(Failure::BrokenOff(so_far.answer.output_ids.len())),
            };
            lines.push(&chunk);
            while let Some(data) = lines.next_event()? {
                if data == "[DONE]" {
                    return match so_far.done {
                        true => Ok(so_far.answer),
                        false => Err(Failure::BrokenOff(so_far.answer.output_ids.len())),
                    };
                }
                self.engine.event(&data, &mut so_far)?;
                progress(so_far.answer.output_ids.len());
            }
            // llama.cpp sends no [DONE]; vLLM's token counts may follow, which nobody waits for.
            if so_far.done {
                return Ok(so_far.answer);
            }
        }
    }

    /// Takes a request back, where the engine has a route for it.
    pub async fn abort(&self, rid: &str) {
        if let Some(call) = self.engine.abort(rid) {
            let _ = self.call(&call, Duration::from_secs(5)).await;
        }
    }
}

/// Server-sent events out of chunks that end anywhere, even within a character.
#[derive(Default)]
struct EventLines {
    bytes: Vec<u8>,
    /// Bytes before it were looked at and hold no line end.
    from: usize,
}

impl EventLines {
    fn push(&mut self, chunk: &[u8]) {
        self.bytes.extend_from_slice(chunk);
    }

    /// The next event's data. Every engine sends one `data:` line an event.
    fn next_event(&mut self) -> Result<Option<String>, Refusal> {
        while let Some(end) = self.bytes[self.from..].iter().position(|&b| b == b'\n').map(|at| self.from + at) {
            let line: Vec<u8> = self.bytes.drain(..=end).collect();
            self.from = 0;
            let line = std::str::from_utf8(&line).map_err(|_| Refusal::Garbled("an event that is no UTF-8".into()))?;
            if let Some(data) = line.trim_end().strip_prefix("data:") {
                return Ok(Some(data.trim_start().to_string()));
            }
        }
        self.from = self.bytes.len();
        Ok(None)
    }
}

/// An error with its causes: reqwest's own words leave out why.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn events_survive_any_chunking(cuts in prop::collection::vec(0usize..200, 0..20)) {
            let text = "data: {\"a\": \"é東\"}\r\n\r\n: a comment\nevent: x\ndata:two\n\ndata: [DONE]\n\n".as_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|c| *c < text.len()).chain([0, text.len()]).collect();
            cuts.sort_unstable();
            let (mut lines, mut events) = (EventLines::default(), Vec::new());
            for pair in cuts.windows(2) {
                lines.push(&text[pair[0]..pair[1]]);
                while let Some(event) = lines.next_event().unwrap() {
                    events.push(event);
                }
            }
            prop_assert_eq!(events, ["{\"a\": \"é東\"}", "two", "[DONE]"]);
        }
    }
}
