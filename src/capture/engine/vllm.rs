//! vLLM's completions API with token ids in and out.

use serde_json::{Value, json};

use super::{
    Answer, Call, Echo, Engine, Load, Partial, Refusal, Rendered, ServerFacts, error_inside, ids, metrics, number,
    parse, refused, string, template_arguments,
};
use crate::capture::{Draw, Job};
use crate::recipe::Thinking;
use crate::target::Message;

/// The dialect of `vllm serve`.
pub struct Vllm;

impl Engine for Vllm {
    fn name(&self) -> &'static str {
        "vllm"
    }

    fn facts_calls(&self) -> Vec<Call> {
        ["/v1/models", "/version", "/metrics"].map(Call::get).to_vec()
    }

    fn facts(&self, bodies: &[Option<String>]) -> Result<ServerFacts, Refusal> {
        let body = |at: usize| bodies.get(at).and_then(Option::as_deref).unwrap_or("");
        let models = parse(body(0))?;
        let model = models.pointer("/data/0").ok_or_else(|| Refusal::Garbled("no `data` of models".into()))?;
        let served_as = string(model, "id").ok_or_else(|| Refusal::Garbled("a model without `id`".into()))?;
        let info = metrics::samples(body(2), "vllm:cache_config_info").next().map_or("", |(labels, _)| labels);
        let label = |name: &str| metrics::label(info, name);
        let whole = |name: &str| label(name).and_then(|v| v.parse::<usize>().ok());
        let kv_tokens = whole("kv_cache_size_tokens").or_else(|| {
            Some(whole("num_gpu_blocks")? * whole("effective_attention_block_size").or(whole("block_size"))?)
        });
        let kv_bytes = whole("kv_cache_memory_bytes");
        let version = parse(body(1)).ok().and_then(|v| string(&v, "version"));
        Ok(ServerFacts {
            model: string(model, "root").unwrap_or_else(|| served_as.clone()),
            served_as,
            version,
            context: number(model, "max_model_len").unwrap_or(0),
            kv_tokens,
            max_running: None,
            vocab_size: None,
            kv_bytes_per_token: kv_bytes.zip(kv_tokens).map(|(bytes, tokens)| bytes as f64 / tokens.max(1) as f64),
            kv_dtype: label("cache_dtype").map(str::to_string),
            memory_fraction: label("gpu_memory_utilization").and_then(|v| v.parse().ok()),
            gpus: None,
            hierarchical_cache: label("kv_offloading_size").map(|size| size != "None"),
        })
    }

    fn load_calls(&self) -> Vec<Call> {
        vec![Call::get("/metrics")]
    }

    fn load(&self, body: &str) -> Option<Load> {
        Some(Load {
            running: metrics::sum(body, "vllm:num_requests_running")? as usize,
            waiting: metrics::sum(body, "vllm:num_requests_waiting")? as usize,
            kv_use: metrics::greatest(body, "vllm:kv_cache_usage_perc"),
            preempted: metrics::sum(body, "vllm:num_preemptions_total").map(|n| n as u64),
        })
    }

    fn generate(&self, job: &Job, draw: &Draw, served_as: &str, stream: bool) -> Call {
        // What is left out comes from the model's generation_config.json, unseen; so everything that draws is sent.
        let mut body = json!({
            "model": served_as,
            "prompt": *job.prompt_ids,
            "max_tokens": job.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "top_k": if draw.top_k == 0 { -1 } else { draw.top_k as i64 },
            "min_p": 0,
            "repetition_penalty": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "seed": job.seed,
            "skip_special_tokens": false,
            "add_special_tokens": false,
            "return_token_ids": true,
            "stream": stream,
        });
        if !draw.stop_token_ids.is_empty() {
            body["stop_token_ids"] = json!(draw.stop_token_ids);
        }
        Call::post("/v1/completions", body)
    }

    fn answer(&self, status: u16, body: &str) -> Result<Answer, Refusal> {
        if status != 200 {
            return Err(refused(status, body));
        }
        let mut partial = Partial::default();
        self.event(body, &mut partial)?;
        match partial.done {
            true => Ok(partial.answer),
            false => Err(Refusal::Garbled("an answer without `finish_reason`".into())),
        }
    }

    fn event(&self, data: &str, so_far: &mut Partial) -> Result<(), Refusal> {
        let value = parse(data)?;
        if let Some(error) = error_inside(&value) {
            return Err(error);
        }
        let choices = value.get("choices").and_then(Value::as_array);
        let choices = choices.ok_or_else(|| Refusal::Garbled("no `choices`".into()))?;
        // A last event with the token counts has none.
        let Some(choice) = choices.first() else { return Ok(()) };
        if let Some(prompt) = choice.get("prompt_token_ids").filter(|p| !p.is_null()) {
            so_far.answer.prompt = Echo::Ids(ids(Some(prompt), "prompt_token_ids")?);
        }
        match choice.get("token_ids") {
            Some(Value::Null) => {}
            // Servers before 0.10 have no `return_token_ids` and ignore it.
            None => return Err(Refusal::Garbled("no `token_ids`: this vLLM is too old to return them".into())),
            given => so_far.answer.output_ids.extend(ids(given, "token_ids")?),
        }
        match choice.get("finish_reason").and_then(Value::as_str) {
            None => {}
            Some(kind @ ("stop" | "length")) => {
                so_far.answer.finish_reason = kind.into();
                so_far.done = true;
            }
            Some(other) => return Err(Refusal::Later { status: 200, says: format!("finish_reason `{other}`") }),
        }
        Ok(())
    }

    fn tokenize(&self, text: &str, served_as: &str) -> Call {
        Call::post("/tokenize", json!({ "model": served_as, "prompt": text, "add_special_tokens": false }))
    }

    fn render(&self, messages: &[Message], tools: Option<&Value>, thinking: Thinking, served_as: &str) -> Call {
        // `/v1/chat/completions/render` says the same but is shut unless the server runs with --enable-scale-out.
        let mut body = json!({ "model": served_as, "messages": messages, "add_generation_prompt": true });
        if let Some(tools) = tools {
            body["tools"] = tools.clone();
        }
        if let Some(arguments) = template_arguments(thinking) {
            body["chat_template_kwargs"] = arguments;
        }
        Call::post("/tokenize", body)
    }

    fn rendered(&self, status: u16, body: &str) -> Result<Rendered, Refusal> {
        if status != 200 {
            return Err(refused(status, body));
        }
        Ok(Rendered::Ids(ids(parse(body)?.get("tokens"), "tokens")?))
    }

    fn detokenize(&self, ids: &[u32], served_as: &str) -> Call {
        Call::post("/detokenize", json!({ "model": served_as, "tokens": ids }))
    }

    fn text(&self, status: u16, body: &str) -> Result<String, Refusal> {
        if status != 200 {
            return Err(refused(status, body));
        }
        string(&parse(body)?, "prompt").ok_or_else(|| Refusal::Garbled("no `prompt`".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{recorded, streamed};
    use super::*;

    fn answer(name: &str) -> Result<Answer, Refusal> {
        let (status, body) = recorded("vllm", name);
        Vllm.answer(status, &body)
    }

    #[test]
    fn ids_are_kept_with_the_stop_token() {
        let single = answer("single").unwrap();
        assert_eq!(single.output_ids, [7042, 30, 198, 198, 504, 2988, 314, 42]);
        assert_eq!(single.prompt, Echo::Ids(vec![504, 3575, 282, 4649, 314]));
        let stopped = answer("stop").unwrap();
        assert_eq!((stopped.output_ids.as_slice(), stopped.finish_reason.as_str()), (&[19556, 30, 2][..], "stop"));
    }

    #[test]
    fn a_stream_ends_in_the_same_ids() {
        let (_, body) = recorded("vllm", "stream");
        let partial = streamed(&Vllm, &body).unwrap();
        assert!(partial.done);
        assert_eq!(partial.answer, answer("stop").unwrap());
        let half: String = body.lines().take(3).map(|l| format!("{l}\n")).collect();
        assert!(!streamed(&Vllm, &half).unwrap().done);
    }

    #[test]
    fn refusals_are_final() {
        for name in
            ["outside", "negative", "too_much", "too_much_stream", "too_long", "empty", "unknown_model", "bad_json"]
        {
            assert!(matches!(answer(name), Err(Refusal::Never { .. })), "{name}");
        }
    }

    #[test]
    fn facts_and_load() {
        let bodies = ["models", "version", "metrics"].map(|name| Some(recorded("vllm", name).1));
        let facts = Vllm.facts(&bodies).unwrap();
        assert_eq!((facts.model.as_str(), facts.context, facts.kv_tokens), ("MODEL_DIR", 2048, Some(46_592)));
        assert!((facts.kv_bytes_per_token.unwrap() / 23_040.0 - 1.0).abs() < 0.01);
        let load = Vllm.load(&recorded("vllm", "metrics").1).unwrap();
        assert_eq!((load.running, load.waiting, load.preempted), (1, 0, Some(0)));
        assert!(load.kv_use.is_some_and(|share| share > 0.0 && share < 0.01));
    }
}
