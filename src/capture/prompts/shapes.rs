//! How a row becomes a conversation. Each shape is one public family of datasets; the first that fits is taken.

use serde_json::{Map, Value};

use super::{Content, Prompt};
use crate::target::Message;

/// Keys that hold an id, most telling first.
const IDS: [&str; 9] = [
    "id",
    "conversation_hash",
    "conversation_id",
    "prompt_id",
    "traj_id",
    "question_id",
    "task_id",
    "uuid",
    "instance_id",
];

/// Keys of a message that templates look at.
const KEPT: [&str; 5] = ["tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning"];

/// Reads a row; also says whether it is of the form `{id, dataset, messages}`, whose ids must be unique.
///
/// # Errors
/// What is wrong with it.
pub fn prompt(row: &Value, dataset: &str, number: usize) -> Result<(Prompt, bool), String> {
    let object = row.as_object().ok_or("a row that is no object")?;
    let said = IDS.iter().find_map(|key| match object.get(*key)? {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Number(number) => Some(format!("{dataset}:{number}")),
        _ => None,
    });
    let own = object.contains_key("dataset") && object.contains_key("id") && object.contains_key("messages");
    let id = said.unwrap_or_else(|| format!("{dataset}:{number}"));
    let dataset = object.get("dataset").and_then(Value::as_str).unwrap_or(dataset).to_string();
    let content = content(object)?;
    Ok((Prompt { id, dataset, content }, own))
}

fn content(row: &Map<String, Value>) -> Result<Content, String> {
    for key in ["prompt_ids", "input_ids"] {
        if let Some(list) = row.get(key).and_then(Value::as_array) {
            let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
            let ids: Option<Vec<u32>> = list.iter().map(id).collect();
            let ids = ids.ok_or_else(|| format!("`{key}` holds what is no token id"))?;
            return if ids.is_empty() { Err(format!("`{key}` is empty")) } else { Ok(Content::Ids(ids)) };
        }
    }
    let text = |key: &str| row.get(key).and_then(Value::as_str).map(str::to_string);
    let mut messages = if let Some(list) = list(row, "messages")? {
        turns(&list)?
    } else if let Some(list) = list(row, "conversations")? {
        turns(&list)?
    } else if let Some(list) = list(row, "conversation")? {
        turns(&list)?
    } else if let Some(list) = list(row, "trajectory")? {
        turns(&list)?
    } else if let Some(chat) = text("chat") {
        glaive(&chat)?
    } else if let Some(instruction) = text("instruction") {
        let input = text("input").filter(|input| !input.trim().is_empty());
        vec![user(input.map_or(instruction.clone(), |input| format!("{instruction}\n\n{input}")))]
    } else if let Some(list) = list(row, "prompt")? {
        turns(&list)?
    } else if let Some(turns) = list(row, "data")?.or(list(row, "turns")?) {
        let texts: Option<Vec<String>> = turns.iter().map(|v| v.as_str().map(str::to_string)).collect();
        let texts = texts.ok_or("turns that are no texts")?;
        // UltraChat's `data` alternates; MT-bench's `turns` are the user's alone, of which the first can be asked.
        let alternate = row.contains_key("data");
        let role = |i: usize| if alternate && i % 2 == 1 { "assistant" } else { "user" };
        let all = texts.into_iter().enumerate().map(|(i, text)| Message::new(role(i), text));
        if alternate { all.collect() } else { all.take(1).collect() }
    } else if let Some(prompt) = ["prompt", "question", "problem", "query", "input"].into_iter().find_map(text) {
        vec![user(prompt)]
    } else {
        let keys: Vec<&str> = row.keys().take(8).map(String::as_str).collect();
        return Err(format!("keys {} are none of the known shapes", keys.join(", ")));
    };
    // OpenThoughts and glaive keep the system prompt beside the turns.
    let system = ["system", "system_prompt"].into_iter().find_map(text).filter(|text| !text.trim().is_empty());
    if let Some(system) = system.filter(|_| messages.first().is_none_or(|m| m.role != "system")) {
        let system = system.trim().strip_prefix("SYSTEM:").unwrap_or(&system).trim().to_string();
        messages.insert(0, Message::new("system", system));
    }
    let tools = match row.get("tools") {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => serde_json::from_str(text).ok(),
        // Parquet keeps them as a list of JSON texts.
        Some(Value::Array(items)) => {
            let read = |v: &Value| v.as_str().map_or(Some(v.clone()), |text| serde_json::from_str(text).ok());
            items.iter().map(read).collect::<Option<Vec<Value>>>().map(Value::Array)
        }
        Some(other) => Some(other.clone()),
    };
    Ok(Content::Messages { messages: ready(messages)?, tools })
}

fn user(text: String) -> Message {
    Message::new("user", text)
}

/// A list, or a text that holds one as JSON.
fn list(row: &Map<String, Value>, key: &str) -> Result<Option<Vec<Value>>, String> {
    match row.get(key) {
        Some(Value::Array(list)) => Ok(Some(list.clone())),
        Some(Value::String(text)) if text.trim_start().starts_with('[') && key != "prompt" => {
            serde_json::from_str(text).map(Some).map_err(|e| format!("`{key}` is a text that is no JSON list: {e}"))
        }
        _ => Ok(None),
    }
}

/// Turns under any of the names for who speaks and what is said.
fn turns(list: &[Value]) -> Result<Vec<Message>, String> {
    if list.is_empty() {
        return Err("no messages".into());
    }
    list.iter().map(turn).collect()
}

fn turn(value: &Value) -> Result<Message, String> {
    let said = |keys: [&str; 2]| keys.iter().find_map(|key| value.get(*key).and_then(Value::as_str));
    let who = said(["role", "from"]).ok_or("a turn without `role` or `from`")?;
    let role = match who.to_ascii_lowercase().as_str() {
        "user" | "human" | "prompter" => "user",
        "assistant" | "gpt" | "ai" | "model" | "bot" | "chatgpt" | "bing" | "bard" => "assistant",
        "system" | "developer" => "system",
        "tool" | "function" | "observation" | "function_response" | "tool_response" | "ipython" => "tool",
        _ => return Err(format!("role `{who}` is not user, assistant, system or tool")),
    };
    let content = ["content", "value", "text", "system_prompt"].iter().find_map(|key| match value.get(*key)? {
        Value::String(text) => Some(Ok(text.clone())),
        Value::Array(parts) => Some(parts.iter().map(part).collect::<Result<Vec<_>, _>>().map(|texts| texts.concat())),
        Value::Null => None,
        other => Some(Err(format!("content that is no text: {}", kind(other)))),
    });
    let mut message = Message::new(role, content.transpose()?.unwrap_or_default());
    for key in KEPT {
        if let Some(kept) = value.get(key).filter(|v| !v.is_null()) {
            message.more.insert(key.into(), kept.clone());
        }
    }
    Ok(message)
}

/// One part of a content list.
fn part(value: &Value) -> Result<String, String> {
    let text = value.as_str().or_else(|| value.get("text").and_then(Value::as_str));
    let kind = value.get("type").and_then(Value::as_str).unwrap_or("a part");
    text.map(str::to_string).ok_or_else(|| format!("content with {kind}, which is no text"))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::Object(_) => "an object",
        _ => "something else",
    }
}

/// glaive function calling v2: one text in which `USER:`, `ASSISTANT:` and `FUNCTION RESPONSE:` open the turns.
fn glaive(chat: &str) -> Result<Vec<Message>, String> {
    const MARKS: [(&str, &str); 3] = [("USER:", "user"), ("ASSISTANT:", "assistant"), ("FUNCTION RESPONSE:", "tool")];
    let mut starts: Vec<(usize, usize, &str)> = MARKS
        .iter()
        .flat_map(|(mark, role)| chat.match_indices(mark).map(|(at, _)| (at, at + mark.len(), *role)))
        // Only where a turn can begin; the words may also stand inside one.
        .filter(|(at, ..)| {
            chat[..*at].trim_end_matches(' ').is_empty() || chat[..*at].trim_end_matches(' ').ends_with('\n')
        })
        .collect();
    starts.sort_unstable();
    if starts.is_empty() {
        return Err("`chat` without USER: or ASSISTANT:".into());
    }
    let ends = starts.iter().skip(1).map(|(at, ..)| *at).chain([chat.len()]);
    let turns = starts.iter().zip(ends).map(|(&(_, from, role), to)| {
        let text = chat[from..to].trim().trim_end_matches("<|endoftext|>").trim();
        Message::new(role, text.to_string())
    });
    Ok(turns.collect())
}

/// Drops what comes before the first turn of a user and the assistant's turns at the end, which the target writes anew.
fn ready(mut messages: Vec<Message>) -> Result<Vec<Message>, String> {
    if messages.is_empty() {
        return Err("no messages".into());
    }
    while messages.last().is_some_and(|m| m.role == "assistant") {
        messages.pop();
    }
    let opening = messages.iter().position(|m| m.role != "system").unwrap_or(messages.len());
    while messages.get(opening).is_some_and(|m| m.role == "assistant") {
        messages.remove(opening);
    }
    match messages.last() {
        None => Err("only the assistant's turns; nothing to answer".into()),
        Some(last) if last.role == "system" => Err("ends with a system turn; nothing to answer".into()),
        Some(_) => match messages.iter().find(|m| m.role == "user" && m.content.trim().is_empty()) {
            Some(_) => Err("an empty turn of the user".into()),
            None => Ok(messages),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(json: &str) -> Vec<(String, String)> {
        let row: Value = serde_json::from_str(json).unwrap();
        match prompt(&row, "set", 7).unwrap().0.content {
            Content::Messages { messages, .. } => messages.into_iter().map(|m| (m.role, m.content)).collect(),
            Content::Ids(ids) => vec![("ids".into(), format!("{ids:?}"))],
        }
    }

    #[test]
    fn every_shape_gives_its_turns() {
        let hi = [("user", "hi")];
        let long = [("system", "be"), ("user", "hi"), ("assistant", "a"), ("user", "more")];
        let cases: [(&str, &[(&str, &str)]); 15] = [
            (r#"{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"x"}]}"#, &hi),
            (
                r#"{"messages":[{"role":"user","content":[{"type":"text","text":"h"},{"type":"text","text":"i"}]}]}"#,
                &hi,
            ),
            (r#"{"messages":"[{\"role\":\"user\",\"content\":\"hi\"}]"}"#, &hi),
            (
                r#"{"conversations":[{"from":"gpt","value":"?"},{"from":"human","value":"hi"},{"from":"gpt","value":"x"}]}"#,
                &hi,
            ),
            (
                r#"{"system":"be","conversations":[{"from":"user","value":"hi"},{"from":"assistant","value":"a"},{"from":"user","value":"more"},{"from":"assistant","value":"x"}]}"#,
                &long,
            ),
            (
                r#"{"conversation_hash":"h","conversation":[{"role":"user","content":"hi","toxic":false}],"turn":1}"#,
                &hi,
            ),
            (
                r#"{"instance_id":"i","trajectory":[{"role":"system","text":null,"system_prompt":"be"},{"role":"user","text":"hi"},{"role":"ai","text":"a"},{"role":"user","text":"more"},{"role":"ai","text":"x"}]}"#,
                &long,
            ),
            (r#"{"instruction":"hi","input":"","output":"x"}"#, &hi),
            (r#"{"instruction":"Sum.","input":"1 2","output":"3"}"#, &[("user", "Sum.\n\n1 2")]),
            (
                r#"{"system":"SYSTEM: be","chat":"USER: hi\n\n\nASSISTANT: a <|endoftext|>\n\n\nUSER: more\n\n\nASSISTANT: x <|endoftext|>"}"#,
                &long,
            ),
            (
                r#"{"chat":"USER: call USER: now\n\n\nASSISTANT: <functioncall> {\"name\": \"f\", \"arguments\": '{\"k\": 1}'} <|endoftext|>\n\n\nFUNCTION RESPONSE: {\"v\": 2}\n\n\nASSISTANT: two"}"#,
                &[
                    ("user", "call USER: now"),
                    ("assistant", r#"<functioncall> {"name": "f", "arguments": '{"k": 1}'}"#),
                    ("tool", r#"{"v": 2}"#),
                ],
            ),
            (r#"{"id":"0","data":["hi","x"]}"#, &hi),
            (r#"{"question_id":81,"category":"writing","turns":["hi","again"]}"#, &hi),
            (r#"{"prompt":"hi"}"#, &hi),
            (r#"{"input_ids":[1,2]}"#, &[("ids", "[1, 2]")]),
        ];
        for (json, wanted) in cases {
            let wanted: Vec<(String, String)> = wanted.iter().map(|(r, c)| (r.to_string(), c.to_string())).collect();
            assert_eq!(read(json), wanted, "{json}");
        }
    }

    #[test]
    fn ids_datasets_tools_and_extras_are_kept() {
        let row = serde_json::json!({"question_id": 81, "tools": ["{\"type\":\"function\"}"], "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "c"}], "weight": 1},
            {"role": "tool", "tool_call_id": "c", "content": "ok"}]});
        let (prompt, own) = prompt(&row, "set", 7).unwrap();
        assert_eq!((prompt.id.as_str(), prompt.dataset.as_str(), own), ("set:81", "set", false));
        let Content::Messages { messages, tools } = prompt.content else { panic!() };
        assert_eq!(tools.unwrap()[0]["type"], "function");
        assert!(messages[1].more.contains_key("tool_calls") && !messages[1].more.contains_key("weight"));
        assert_eq!(messages[2].more["tool_call_id"], "c");
    }

    proptest! {
        #[test]
        fn any_row_is_read_or_refused(text in ".{0,120}", key in "(messages|conversations|chat|trajectory|data|turns|prompt|input_ids|tools|system)") {
            let value = serde_json::from_str(&text).unwrap_or(Value::String(text.clone()));
            let _ = prompt(&serde_json::json!({ key.clone(): value, "chat": text }), "d", 1);
            let _ = prompt(&serde_json::json!({ key: [{ "role": text, "content": text }], "messages": [[], {}] }), "d", 1);
            let _ = glaive(&text);
        }
    }
}
