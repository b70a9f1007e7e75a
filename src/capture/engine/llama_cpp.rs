//! llama.cpp's server: `/completion` with ids in and `return_tokens`.

use serde_json::{Value, json};

use super::{
    Answer, Call, Echo, Engine, Load, Partial, Refusal, Rendered, ServerFacts, error_inside, ids, metrics, number,
    parse, refused, string, template_arguments,
};
use crate::capture::{Draw, Job};
use crate::recipe::Thinking;
use crate::target::Message;

/// The dialect of `llama-server`.
pub struct LlamaCpp;

impl Engine for LlamaCpp {
    fn name(&self) -> &'static str {
        "llama.cpp"
    }

    fn facts_calls(&self) -> Vec<Call> {
        ["/props", "/v1/models"].map(Call::get).to_vec()
    }

    fn facts(&self, bodies: &[Option<String>]) -> Result<ServerFacts, Refusal> {
        let body = |at: usize| bodies.get(at).and_then(Option::as_deref).unwrap_or("");
        let props = parse(body(0))?;
        let model = string(&props, "model_path").ok_or_else(|| Refusal::Garbled("no `model_path`".into()))?;
        let models = parse(body(1)).unwrap_or(Value::Null);
        let meta = models.pointer("/data/0/meta").cloned().unwrap_or(Value::Null);
        let slots = number(&props, "total_slots");
        let context = props.pointer("/default_generation_settings/n_ctx").and_then(Value::as_u64).map(|n| n as usize);
        let context = number(&meta, "n_ctx").or(context).unwrap_or(0);
        Ok(ServerFacts {
            served_as: string(&props, "model_alias").unwrap_or_else(|| model.clone()),
            model,
            version: string(&props, "build_info"),
            context,
            // Every slot has its own share of the cache.
            kv_tokens: slots.map(|slots| slots * context),
            max_running: slots,
            vocab_size: number(&meta, "n_vocab"),
            ..ServerFacts::default()
        })
    }

    fn load_calls(&self) -> Vec<Call> {
        // `/metrics` needs --metrics; `/slots` is open unless the server runs with --no-slots.
        ["/metrics", "/slots"].map(Call::get).to_vec()
    }

    fn load(&self, body: &str) -> Option<Load> {
        if let Some(running) = metrics::sum(body, "llamacpp:requests_processing") {
            let waiting = metrics::sum(body, "llamacpp:requests_deferred")? as usize;
            return Some(Load { running: running as usize, waiting, kv_use: None, preempted: None });
        }
        let slots: Vec<Value> = serde_json::from_str(body).ok()?;
        let busy = |slot: &&Value| slot.get("is_processing").and_then(Value::as_bool) == Some(true);
        Some(Load { running: slots.iter().filter(busy).count(), ..Load::default() })
    }

    fn generate(&self, job: &Job, draw: &Draw, _served_as: &str, stream: bool) -> Call {
        // Left out, top_k would be 40 and min_p 0.05. `stop_token_ids` has no counterpart: the file's own
        // end-of-generation tokens end an answer.
        let body = json!({
            "prompt": *job.prompt_ids,
            "n_predict": job.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "top_k": draw.top_k,
            "min_p": 0,
            "repeat_penalty": 1,
            "samplers": ["top_k", "top_p", "temperature"],
            "seed": job.seed as u32,
            "return_tokens": true,
            "cache_prompt": true,
            "stream": stream,
        });
        Call::post("/completion", body)
    }

    fn answer(&self, status: u16, body: &str) -> Result<Answer, Refusal> {
        if status != 200 {
            return Err(refused(status, body));
        }
        let mut partial = Partial::default();
        self.event(body, &mut partial)?;
        match partial.done {
            true => Ok(partial.answer),
            false => Err(Refusal::Garbled("an answer without `stop`".into())),
        }
    }

    fn event(&self, data: &str, so_far: &mut Partial) -> Result<(), Refusal> {
        let value = parse(data)?;
        if let Some(error) = error_inside(&value) {
            return Err(error);
        }
        so_far.answer.output_ids.extend(ids(value.get("tokens"), "tokens")?);
        if value.get("stop").and_then(Value::as_bool) != Some(true) {
            return Ok(());
        }
        let (got, counted) = (so_far.answer.output_ids.len(), number(&value, "tokens_predicted"));
        if counted.is_some_and(|counted| counted != got) {
            return Err(Refusal::Garbled(format!("{got} ids, but tokens_predicted is {}", counted.unwrap_or(0))));
        }
        so_far.answer.finish_reason = match value.get("stop_type").and_then(Value::as_str) {
            Some("eos" | "word") => "stop".into(),
            Some("limit") => "length".into(),
            other => return Err(Refusal::Later { status: 200, says: format!("stop_type {other:?}") }),
        };
        so_far.answer.prompt = number(&value, "tokens_evaluated").map_or(Echo::Untold, Echo::Count);
        so_far.done = true;
        Ok(())
    }

    fn tokenize(&self, text: &str, _served_as: &str) -> Call {
        Call::post("/tokenize", json!({ "content": text, "add_special": false, "parse_special": true }))
    }

    fn render(&self, messages: &[Message], tools: Option<&Value>, thinking: Thinking, _served_as: &str) -> Call {
        let mut body = json!({ "messages": messages });
        if let Some(tools) = tools {
            body["tools"] = tools.clone();
        }
        if let Some(arguments) = template_arguments(thinking) {
            body["chat_template_kwargs"] = arguments;
        }
        Call::post("/apply-template", body)
    }

    fn rendered(&self, status: u16, body: &str) -> Result<Rendered, Refusal> {
        if status != 200 {
            return Err(refused(status, body));
        }
        let value = parse(body)?;
        match string(&value, "prompt") {
            Some(text) => Ok(Rendered::Text(text)),
            None => Ok(Rendered::Ids(ids(value.get("tokens"), "tokens")?)),
        }
    }

    fn detokenize(&self, ids: &[u32], _served_as: &str) -> Call {
        Call::post("/detokenize", json!({ "tokens": ids }))
    }

    fn text(&self, status: u16, body: &str) -> Result<String, Refusal> {
        if status != 200 {
            return Err(refused(status, body));
        }
        string(&parse(body)?, "content").ok_or_else(|| Refusal::Garbled("no `content`".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{recorded, streamed};
    use super::*;

    fn answer(name: &str) -> Result<Answer, Refusal> {
        let (status, body) = recorded("llama_cpp", name);
        LlamaCpp.answer(status, &body)
    }

    #[test]
    fn ids_are_kept_with_the_stop_token() {
        let single = answer("single").unwrap();
        assert_eq!((single.output_ids.len(), single.finish_reason.as_str()), (8, "length"));
        assert_eq!(single.prompt, Echo::Count(5));
        let stopped = answer("stop").unwrap();
        assert_eq!((stopped.output_ids.as_slice(), stopped.finish_reason.as_str()), (&[19556, 30, 2][..], "stop"));
    }

    #[test]
    fn a_stream_ends_in_the_same_ids() {
        for (stream, whole) in [("stream", "stop"), ("stream_length", "single")] {
            let (_, body) = recorded("llama_cpp", stream);
            let partial = streamed(&LlamaCpp, &body).unwrap();
            assert!(partial.done);
            assert_eq!(partial.answer, answer(whole).unwrap());
        }
    }

    #[test]
    fn refusals_are_final() {
        for name in ["outside", "too_long", "too_long_stream", "empty"] {
            assert!(matches!(answer(name), Err(Refusal::Never { .. })), "{name}");
        }
    }

    #[test]
    fn facts_load_and_rendering() {
        let bodies = ["props", "models"].map(|name| Some(recorded("llama_cpp", name).1));
        let facts = LlamaCpp.facts(&bodies).unwrap();
        assert_eq!((facts.context, facts.kv_tokens, facts.vocab_size), (2048, Some(8192), Some(49_152)));
        assert_eq!(LlamaCpp.load(&recorded("llama_cpp", "metrics").1).unwrap().running, 1);
        assert!(LlamaCpp.load(&recorded("llama_cpp", "slots").1).is_some());
        let (status, body) = recorded("llama_cpp", "apply_template");
        assert!(matches!(LlamaCpp.rendered(status, &body), Ok(Rendered::Text(text)) if text.ends_with("assistant\n")));
        let (status, body) = recorded("llama_cpp", "tokenize");
        assert_eq!(LlamaCpp.rendered(status, &body), Ok(Rendered::Ids(vec![504, 3575, 282, 4649, 314])));
    }
}
