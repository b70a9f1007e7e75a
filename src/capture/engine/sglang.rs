//! SGLang's native API. `/generate` keeps the ids as sampled, stop token and all, and never touches the text.

use serde_json::{Value, json};

use super::{
    Answer, Call, Echo, Engine, Load, Partial, Refusal, Rendered, ServerFacts, error_inside, ids, metrics, number,
    parse, refused, string, template_arguments,
};
use crate::capture::{Draw, Job};
use crate::recipe::Thinking;
use crate::target::Message;

/// The dialect of `python -m sglang.launch_server`.
pub struct Sglang;

/// Every event repeats all ids so far, so that a long answer sent token by token would cost quadratic traffic. One
/// event in this many steps keeps it linear and still tells what is in flight.
const STREAM_INTERVAL: usize = 64;

impl Engine for Sglang {
    fn name(&self) -> &'static str {
        "sglang"
    }

    fn facts_calls(&self) -> Vec<Call> {
        ["/server_info", "/v1/models", "/metrics"].map(Call::get).to_vec()
    }

    fn facts(&self, bodies: &[Option<String>]) -> Result<ServerFacts, Refusal> {
        let body = |at: usize| bodies.get(at).and_then(Option::as_deref).unwrap_or("");
        let info = parse(body(0))?;
        let model = string(&info, "model_path").ok_or_else(|| Refusal::Garbled("no `model_path`".into()))?;
        let models = parse(body(1)).unwrap_or(Value::Null);
        let memory = info.pointer("/internal_states/0/memory_usage");
        let kv_tokens = number(&info, "max_total_num_tokens");
        let kv_bytes = metrics::greatest(body(2), "sglang:kv_cache_memory_usage_gb")
            .or_else(|| memory.and_then(|m| m.get("kvcache")).and_then(Value::as_f64))
            .map(|gib| gib * 2f64.powi(30));
        // `context_length` stays null unless it was set by hand; the model list has what is in force.
        let context = models.pointer("/data/0/max_model_len").and_then(Value::as_u64);
        Ok(ServerFacts {
            served_as: string(&info, "served_model_name").unwrap_or_else(|| model.clone()),
            model,
            version: string(&info, "version"),
            context: context.map(|n| n as usize).or_else(|| number(&info, "context_length")).unwrap_or(0),
            kv_tokens,
            max_running: number(&info, "max_running_requests"),
            vocab_size: None,
            kv_bytes_per_token: kv_bytes.zip(kv_tokens).map(|(bytes, tokens)| bytes / tokens.max(1) as f64),
            kv_dtype: string(&info, "kv_cache_dtype"),
            memory_fraction: info.get("mem_fraction_static").and_then(Value::as_f64),
            gpus: number(&info, "tp_size"),
            hierarchical_cache: info.get("enable_hierarchical_cache").and_then(Value::as_bool),
        })
    }

    fn load_calls(&self) -> Vec<Call> {
        // The metrics' gauges are renewed only every few dozen decode steps; `/v1/loads` counts when asked.
        ["/v1/loads?include=core,queues", "/metrics"].map(Call::get).to_vec()
    }

    fn load(&self, body: &str) -> Option<Load> {
        if let Some(loads) = serde_json::from_str::<Value>(body).ok()?.get("loads").and_then(Value::as_array).cloned() {
            let sum = |key: &str| loads.iter().filter_map(|load| number(load, key)).sum();
            let use_of = |load: &Value| load.get("token_usage").and_then(Value::as_f64);
            let retracted = |load: &Value| load.pointer("/queues/retracted").and_then(Value::as_u64);
            return Some(Load {
                running: sum("num_running_reqs"),
                waiting: sum("num_waiting_reqs"),
                kv_use: loads.iter().filter_map(use_of).reduce(f64::max),
                preempted: loads.iter().filter_map(retracted).reduce(|a, b| a + b),
            });
        }
        None
    }

    fn room(&self, context: usize) -> usize {
        // Prompts of context - 6 to context - 1 are refused, whatever `max_req_input_len` says.
        context.saturating_sub(7)
    }

    fn generate(&self, job: &Job, draw: &Draw, _served_as: &str, stream: bool) -> Call {
        // Left out, max_new_tokens would be 128; an unknown sampling key is a 400, an unknown top-level one is ignored.
        let mut sampling = json!({
            "max_new_tokens": job.max_tokens,
            "temperature": draw.temperature,
            "top_p": draw.top_p,
            "top_k": if draw.top_k == 0 { -1 } else { draw.top_k as i64 },
            "skip_special_tokens": false,
            "no_stop_trim": true,
        });
        if !draw.stop_token_ids.is_empty() {
            sampling["stop_token_ids"] = json!(draw.stop_token_ids);
        }
        if stream {
            sampling["stream_interval"] = json!(STREAM_INTERVAL);
        }
        let body =
            json!({ "rid": job.rid, "input_ids": *job.prompt_ids, "sampling_params": sampling, "stream": stream });
        Call::post("/generate", body)
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
        let meta = value.get("meta_info").ok_or_else(|| Refusal::Garbled("no `meta_info`".into()))?;
        let output_ids = ids(value.get("output_ids"), "output_ids")?;
        // Cumulative, unless the server was told to send increments: then an event is shorter than its count.
        match number(meta, "completion_tokens") {
            Some(all) if output_ids.len() < all && so_far.answer.output_ids.len() + output_ids.len() == all => {
                so_far.answer.output_ids.extend(output_ids);
            }
            _ => so_far.answer.output_ids = output_ids,
        }
        so_far.answer.prompt = number(meta, "prompt_tokens").map_or(Echo::Untold, Echo::Count);
        so_far.answer.queued_s = meta.get("queue_time").and_then(Value::as_f64);
        let Some(reason) = meta.get("finish_reason").filter(|r| !r.is_null()) else { return Ok(()) };
        match reason.get("type").and_then(Value::as_str) {
            Some(kind @ ("stop" | "length")) => {
                let counted = number(meta, "completion_tokens").unwrap_or(so_far.answer.output_ids.len());
                if counted != so_far.answer.output_ids.len() {
                    let got = so_far.answer.output_ids.len();
                    return Err(Refusal::Garbled(format!("{got} ids, but completion_tokens is {counted}")));
                }
                so_far.answer.finish_reason = kind.into();
                so_far.done = true;
                Ok(())
            }
            // The queue was full, the request was aborted, or the scheduler gave it up.
            _ => {
                let status = number(reason, "status_code").unwrap_or(503) as u16;
                let says = string(reason, "message").unwrap_or_else(|| reason.to_string());
                match status {
                    400..=499 if status != 429 => Err(Refusal::Never { status, says }),
                    _ => Err(Refusal::Later { status, says }),
                }
            }
        }
    }

    fn abort(&self, job: &str) -> Option<Call> {
        Some(Call::post("/abort_request", json!({ "rid": job })))
    }

    fn tokenize(&self, text: &str, served_as: &str) -> Call {
        Call::post("/v1/tokenize", json!({ "model": served_as, "prompt": text, "add_special_tokens": false }))
    }

    fn render(&self, messages: &[Message], tools: Option<&Value>, thinking: Thinking, served_as: &str) -> Call {
        let mut body = json!({ "model": served_as, "messages": messages, "add_generation_prompt": true });
        if let Some(tools) = tools {
            body["tools"] = tools.clone();
        }
        if let Some(arguments) = template_arguments(thinking) {
            body["chat_template_kwargs"] = arguments;
        }
        Call::post("/v1/tokenize", body)
    }

    fn rendered(&self, status: u16, body: &str) -> Result<Rendered, Refusal> {
        if status != 200 {
            return Err(refused(status, body));
        }
        Ok(Rendered::Ids(ids(parse(body)?.get("tokens"), "tokens")?))
    }

    fn detokenize(&self, ids: &[u32], served_as: &str) -> Call {
        Call::post("/v1/detokenize", json!({ "model": served_as, "tokens": ids, "skip_special_tokens": true }))
    }

    fn text(&self, status: u16, body: &str) -> Result<String, Refusal> {
        if status != 200 {
            return Err(refused(status, body));
        }
        string(&parse(body)?, "text").ok_or_else(|| Refusal::Garbled("no `text`".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{recorded, streamed};
    use super::*;

    fn answer(name: &str) -> Result<Answer, Refusal> {
        let (status, body) = recorded("sglang", name);
        Sglang.answer(status, &body)
    }

    #[test]
    fn ids_are_kept_with_the_stop_token() {
        let single = answer("single").unwrap();
        assert_eq!(single.output_ids, [7042, 30, 198, 198, 504, 2988, 314, 42]);
        assert_eq!((single.finish_reason.as_str(), single.prompt), ("length", Echo::Count(5)));
        let stopped = answer("stop").unwrap();
        assert_eq!((stopped.output_ids.as_slice(), stopped.finish_reason.as_str()), (&[19556, 30, 2][..], "stop"));
    }

    #[test]
    fn a_stream_ends_in_the_same_ids() {
        let (_, body) = recorded("sglang", "stream");
        let partial = streamed(&Sglang, &body).unwrap();
        assert!(partial.done);
        assert_eq!(partial.answer.output_ids, answer("single").unwrap().output_ids);
        // Cut before its end, it is no answer.
        let half: String = body.lines().take(3).map(|l| format!("{l}\n")).collect();
        assert!(!streamed(&Sglang, &half).unwrap().done);
    }

    #[test]
    fn errors_inside_a_200_are_errors() {
        for (name, never, says) in [
            ("too_long_stream", true, "longer than the model's context"),
            ("queue_full_stream", false, "queue is full"),
            ("aborted_stream", false, "Aborted"),
        ] {
            let (status, body) = recorded("sglang", name);
            assert_eq!(status, 200, "{name}");
            let refusal = streamed(&Sglang, &body).unwrap_err();
            assert_eq!(matches!(refusal, Refusal::Never { .. }), never, "{name}: {refusal}");
            assert!(refusal.to_string().contains(says), "{refusal}");
        }
        assert!(matches!(answer("aborted"), Err(Refusal::Later { .. })));
    }

    #[test]
    fn refusals_say_whether_to_come_again() {
        for (name, never) in
            [("too_long", true), ("too_much", true), ("unknown_sampling", true), ("empty", true), ("queue_full", false)]
        {
            let refusal = answer(name).unwrap_err();
            assert_eq!(matches!(refusal, Refusal::Never { .. }), never, "{name}: {refusal}");
        }
        let key = Sglang.answer(401, r#"{"error":"Unauthorized"}"#).unwrap_err();
        assert!(matches!(&key, Refusal::Key { .. }) && key.to_string().contains("api_key"), "{key}");
    }

    #[test]
    fn facts_and_load() {
        let bodies = ["server_info", "models", "metrics"].map(|name| Some(recorded("sglang", name).1));
        let facts = Sglang.facts(&bodies).unwrap();
        assert_eq!((facts.model.as_str(), facts.context, facts.kv_tokens), ("MODEL_DIR", 8192, Some(4096)));
        // 30 layers, 3 heads of 64, keys and values, two bytes each.
        let bytes = facts.kv_bytes_per_token.unwrap();
        assert!((bytes / 23_040.0 - 1.0).abs() < 0.02, "{bytes}");
        let load = Sglang.load(&recorded("sglang", "loads").1).unwrap();
        assert_eq!((load.running, load.waiting, load.preempted), (0, 0, Some(0)));
        let (status, body) = recorded("sglang", "tokenize");
        let Rendered::Ids(ids) = Sglang.rendered(status, &body).unwrap() else { panic!() };
        assert_eq!((ids.len(), ids[0]), (31, 1));
    }
}
