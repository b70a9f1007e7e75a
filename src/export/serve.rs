//! The commands that serve a head, as the engines' own documentation spells them.

use std::path::Path;

/// `(engine, command)` for a target and a head with `k` drafts a verification, for the engines that are wanted. Where
/// an engine needs more than one step, the steps are joined by `&&`.
///
/// `target` is a Hugging Face folder or the hub's name of a model. Names are quoted for a POSIX shell.
pub fn commands(target: &str, head: &Path, k: usize, engines: &[String]) -> Vec<(&'static str, String)> {
    let head = head.display().to_string();
    let vllm = format!(
        "{{\"method\": \"eagle3\", \"model\": {}, \"num_speculative_tokens\": {k}}}",
        serde_json::Value::from(head.as_str())
    );
    let (head, vllm, named) = (quoted(&head), quoted(&vllm), quoted(target));
    // llama.cpp's converter reads folders only.
    let (fetch, folder) = match Path::new(target).is_dir() {
        true => (String::new(), named.clone()),
        false => (format!("hf download {named} --local-dir target && "), "target".to_string()),
    };
    let all = [
        ("vllm", format!("vllm serve {named} --speculative-config {vllm}")),
        (
            "sglang",
            format!(
                "python3 -m sglang.launch_server --model-path {named} --speculative-algorithm EAGLE3 \
                 --speculative-draft-model-path {head} --speculative-num-steps {k} --speculative-eagle-topk 1 \
                 --speculative-num-draft-tokens {}",
                k + 1
            ),
        ),
        (
            "llama.cpp",
            format!(
                "{fetch}python3 convert_hf_to_gguf.py {folder} --outtype bf16 --outfile target.gguf && \
                 python3 convert_hf_to_gguf.py {head} --target-model-dir {folder} --outtype bf16 \
                 --outfile head.gguf && \
                 llama-server -m target.gguf -md head.gguf --spec-type draft-eagle3 --spec-draft-n-max {k}"
            ),
        ),
    ];
    all.into_iter().filter(|(engine, _)| engines.iter().any(|wanted| wanted == engine)).collect()
}

/// A word for a POSIX shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:=@%+,".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_string(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<String> {
        super::super::engines::ENGINES.map(String::from).to_vec()
    }

    #[test]
    fn commands_carry_the_drafts_and_only_wanted_engines() {
        let commands: std::collections::BTreeMap<_, _> =
            commands("org/model", Path::new("run/head"), 3, &all()).into_iter().collect();
        assert_eq!(
            commands["vllm"],
            "vllm serve org/model --speculative-config \
             '{\"method\": \"eagle3\", \"model\": \"run/head\", \"num_speculative_tokens\": 3}'"
        );
        assert!(
            commands["sglang"]
                .ends_with("--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4")
        );
        assert!(commands["llama.cpp"].starts_with("hf download org/model --local-dir target && "));
        assert!(commands["llama.cpp"].contains("convert_hf_to_gguf.py run/head --target-model-dir target "));
        assert!(commands["llama.cpp"].ends_with("--spec-type draft-eagle3 --spec-draft-n-max 3"));
        assert_eq!(super::commands("m", Path::new("h"), 3, &["sglang".into()]).len(), 1);
    }

    #[test]
    fn a_folder_is_not_fetched_and_odd_names_are_quoted() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("it's a model");
        std::fs::create_dir(&target).unwrap();
        let made = commands(&target.display().to_string(), Path::new("my \"head\""), 2, &all());
        for (engine, command) in made {
            assert!(!command.contains("hf download"), "{command}");
            // A shell splits the command into the words that were meant; one step, so that nothing is started.
            let echoed = format!("printf '%s\\n' {}", command.replace("&&", ""));
            let words = std::process::Command::new("sh").arg("-c").arg(echoed).output();
            let words = String::from_utf8(words.unwrap().stdout).unwrap();
            assert!(words.lines().any(|word| word == target.display().to_string()), "{engine}: {words}");
            let json = words.lines().find(|word| word.starts_with('{'));
            if let Some(json) = json {
                let json: serde_json::Value = serde_json::from_str(json).unwrap();
                assert_eq!(json["model"], "my \"head\"");
            }
        }
    }
}
