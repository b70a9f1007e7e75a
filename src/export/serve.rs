//! The commands that serve a head, as the engines' own documentation spells them.

use std::path::Path;

/// `(engine, command)` for a target and a head with `k` drafts a verification. Where the engine needs more than one
/// step, the steps are joined by `&&`.
pub fn commands(target: &str, head: &Path, k: usize, engines: &[String]) -> Vec<(&'static str, String)> {
    let head = head.display();
    let all = [
        (
            "vllm",
            format!(
                "vllm serve {target} --speculative-config '{{\"method\": \"eagle3\", \"model\": \"{head}\", \
                 \"num_speculative_tokens\": {k}}}'"
            ),
        ),
        (
            "sglang",
            format!(
                "python3 -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \
                 --speculative-draft-model-path {head} --speculative-num-steps {k} --speculative-eagle-topk 1 \
                 --speculative-num-draft-tokens {}",
                k + 1
            ),
        ),
        (
            "llama.cpp",
            format!(
                "python3 convert_hf_to_gguf.py {target} --outfile target.gguf && \
                 python3 convert_hf_to_gguf.py {head} --target-model-dir {target} --outfile head.gguf && \
                 llama-server -m target.gguf -md head.gguf --spec-type draft-eagle3"
            ),
        ),
    ];
    all.into_iter().filter(|(engine, _)| engines.iter().any(|wanted| wanted == engine)).collect()
}
