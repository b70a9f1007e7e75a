//! Speculative decoding is exact: greedy output is the target's own, sampled output follows its distribution.

mod tiny;

use eaglet::evaluate::decode::Speculator;
use eaglet::target::generate::{Request, Sampler, generate};

fn requests(count: u32, max_tokens: usize) -> Vec<Request> {
    (0..count)
        .map(|i| Request {
            name: format!("r{i}"),
            prompt: (0..3 + i % 5).map(|j| 2 + (i * 7 + j * 3) % 40).collect(),
            max_tokens,
        })
        .collect()
}

#[test]
fn greedy_speculative_output_equals_plain_greedy_output() {
    let model = tiny::model(1);
    let (head, vocab) = tiny::head(3, 40);
    let requests = requests(9, 30);
    let mut plain = vec![Vec::new(); requests.len()];
    generate(
        &model,
        &requests,
        Sampler::GREEDY,
        4,
        1,
        |_| {},
        |answer| {
            plain[answer.request] = answer.output;
            true
        },
    );
    assert!(plain.iter().any(|output| output.len() == 30), "some answer must be long");
    let mut kept = 0;
    for k in 1..=8 {
        for batch in [1, 4] {
            let speculator = Speculator { model: &model, head: &head, vocab: &vocab, k, sampler: Sampler::GREEDY };
            let mut done = 0;
            speculator.decode(&requests, batch, 1, |answer, counts| {
                assert_eq!(answer.output, plain[answer.request], "k {k}, batch {batch}, request {}", answer.request);
                kept += counts.accepted[0];
                done += 1;
                true
            });
            assert_eq!(done, requests.len());
        }
    }
    assert!(kept > 0, "no draft was ever kept, so nothing was tested");
}

#[test]
fn prompts_of_one_token_are_answered() {
    let model = tiny::model(1);
    let (head, vocab) = tiny::head(3, 40);
    let requests: Vec<Request> =
        (2..5).map(|id| Request { name: format!("r{id}"), prompt: vec![id], max_tokens: 9 }).collect();
    let mut plain = vec![Vec::new(); requests.len()];
    generate(
        &model,
        &requests,
        Sampler::GREEDY,
        2,
        1,
        |_| {},
        |answer| {
            plain[answer.request] = answer.output;
            true
        },
    );
    let speculator = Speculator { model: &model, head: &head, vocab: &vocab, k: 3, sampler: Sampler::GREEDY };
    speculator.decode(&requests, 2, 1, |answer, _| {
        assert_eq!(answer.output, plain[answer.request]);
        true
    });
}

/// Total variation distance between two samples of tokens.
fn distance(a: &[usize], b: &[usize]) -> f64 {
    let (sum_a, sum_b) = (a.iter().sum::<usize>() as f64, b.iter().sum::<usize>() as f64);
    a.iter().zip(b).map(|(&x, &y)| (x as f64 / sum_a - y as f64 / sum_b).abs()).sum::<f64>() / 2.0
}

#[test]
fn sampled_speculative_output_follows_the_target() {
    let model = tiny::model(1);
    let (head, vocab) = tiny::head(3, 40);
    let sampler = Sampler { temperature: 0.6, top_p: 0.9 };
    let prompt = vec![5, 9, 2];
    let requests: Vec<Request> =
        (0..3000).map(|i| Request { name: format!("s{i}"), prompt: prompt.clone(), max_tokens: 4 }).collect();
    // The second to fourth token of each answer: the first is the target's in both.
    let count = |outputs: &[Vec<u32>]| -> Vec<Vec<usize>> {
        (1..4)
            .map(|at| {
                let mut counts = vec![0; tiny::VOCAB];
                outputs.iter().filter_map(|output| output.get(at)).for_each(|&token| counts[token as usize] += 1);
                counts
            })
            .collect()
    };
    let plain = |seed: u64| {
        let mut outputs = Vec::new();
        generate(
            &model,
            &requests,
            sampler,
            500,
            seed,
            |_| {},
            |answer| {
                outputs.push(answer.output);
                true
            },
        );
        count(&outputs)
    };
    let mut outputs = Vec::new();
    let mut kept = 0;
    let speculator = Speculator { model: &model, head: &head, vocab: &vocab, k: 2, sampler };
    speculator.decode(&requests, 500, 3, |answer, counts| {
        kept += counts.accepted[0];
        outputs.push(answer.output);
        true
    });
    assert!(kept > 100, "only {kept} drafts were kept");
    let (one, other, speculative) = (plain(1), plain(2), count(&outputs));
    for at in 0..3 {
        // Two plain samples differ by chance alone; speculation may not differ by much more.
        let chance = distance(&one[at], &other[at]);
        let found = distance(&one[at], &speculative[at]).min(distance(&other[at], &speculative[at]));
        assert!(found < 2.0 * chance + 0.01, "token {}: {found} where chance gives {chance}", at + 1);
    }
}
