//! Which drafts the target keeps, and what it says next: rejection sampling (arXiv 2211.17192, algorithm 1), whose
//! output follows the target's distribution whatever the draft's is.

use rand::Rng;

use crate::target::generate::{argmax, pick};

/// The outcome of one verification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Drafts kept, from the first.
    pub accepted: usize,
    /// The token after them: the target's own where all were kept (the bonus token), else what replaces the refused.
    pub next: u32,
}

/// Greedy: keeps drafts while they are the target's likeliest token. `logits` has one row more than there are drafts.
pub fn greedy(drafts: &[u32], logits: &[&[f32]]) -> Verdict {
    let top = |i: usize| argmax(logits[i]) as u32;
    let accepted = drafts.iter().enumerate().take_while(|&(i, &draft)| top(i) == draft).count();
    Verdict { accepted, next: top(accepted) }
}

/// Sampled: `p` holds the target's distribution at each draft and after the last, `q` the one each draft was drawn
/// from, all over the target's vocabulary.
pub fn sampled(drafts: &[u32], p: &[Vec<f32>], q: &[Vec<f32>], rng: &mut impl Rng) -> Verdict {
    for (i, &draft) in drafts.iter().enumerate() {
        let (p, q) = (&p[i], &q[i]);
        let at = draft as usize;
        if rng.random::<f32>() * q[at] < p[at] {
            continue;
        }
        let mut rest: Vec<f32> = p.iter().zip(q).map(|(&p, &q)| (p - q).max(0.0)).collect();
        // p and q can be equal but for rounding; then the refusal itself was rounding.
        if rest.iter().all(|&x| x <= 0.0) {
            rest.clone_from(p);
        }
        return Verdict { accepted: i, next: pick(&rest, rng) };
    }
    Verdict { accepted: drafts.len(), next: pick(&p[drafts.len()], rng) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn greedy_keeps_the_common_prefix() {
        let rows: [&[f32]; 3] = [&[0.0, 1.0, 0.0], &[1.0, 0.0, 0.0], &[0.0, 0.0, 1.0]];
        assert_eq!(greedy(&[1, 0], &rows), Verdict { accepted: 2, next: 2 });
        assert_eq!(greedy(&[1, 2], &rows), Verdict { accepted: 1, next: 0 });
        assert_eq!(greedy(&[0, 0], &rows), Verdict { accepted: 0, next: 1 });
    }

    /// The first two tokens out of a verification follow the target, though the draft believes something else.
    #[test]
    fn what_comes_out_follows_the_target() {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        // The second position's distributions depend on the first token.
        let p0 = vec![0.5f32, 0.3, 0.2, 0.0];
        let p1 = |first: u32| if first == 0 { vec![0.1f32, 0.2, 0.3, 0.4] } else { vec![0.7, 0.1, 0.1, 0.1] };
        let q0 = vec![0.1f32, 0.1, 0.4, 0.4];
        let q1 = |first: u32| if first == 2 { vec![0.0f32, 0.5, 0.5, 0.0] } else { vec![0.25; 4] };
        let trials = 200_000;
        let mut first = [0usize; 4];
        let mut second = [[0usize; 4]; 4];
        for _ in 0..trials {
            let d0 = pick(&q0, &mut rng);
            let d1 = pick(&q1(d0), &mut rng);
            let verdict = sampled(&[d0, d1], &[p0.clone(), p1(d0), vec![0.25; 4]], &[q0.clone(), q1(d0)], &mut rng);
            let tokens: Vec<u32> = [d0, d1][..verdict.accepted].iter().copied().chain([verdict.next]).collect();
            first[tokens[0] as usize] += 1;
            if let Some(&token) = tokens.get(1) {
                second[tokens[0] as usize][token as usize] += 1;
            }
        }
        let off = |count: usize, of: usize, p: f32| (count as f64 / of as f64 - f64::from(p)).abs();
        for token in 0..4 {
            assert!(off(first[token], trials, p0[token]) < 0.005, "{first:?}");
        }
        for (token, counts) in second.iter().enumerate().take(3) {
            let of: usize = counts.iter().sum();
            for (next, &count) in counts.iter().enumerate() {
                assert!(off(count, of, p1(token as u32)[next]) < 0.02, "after {token}: {counts:?}");
            }
        }
    }
}
