//! Answer lengths from whole answers and from those still in flight.
//!
//! Whoever averages the answers that are through after a few minutes sees mostly short ones: the long ones are still being
//! written. An answer in flight says "longer than this"; Kaplan and Meier's estimator (1958) counts it so. What it leaves
//! open beyond the longest answer is closed by an exponential tail. Uncertainty is by the Bayesian bootstrap (Rubin 1981):
//! each draw weighs every observation anew.

use rand::Rng;
use rand_distr::{Distribution, Gamma};

/// Bins of lengths, spaced by logarithm.
const BINS: usize = 256;
/// Longest length the bins tell apart.
const LONGEST: f64 = 1_048_576.0;
/// Answers' worth of trust that a dataset is spread like all others: it counts while its own answers are few.
const POOLED: f64 = 2.0;
/// See [`Seen::draw`].
const FEW: f64 = 4.0;
/// The tail is fitted to the longest answers: this share of them, and no fewer than so many.
const TAIL_SHARE: f64 = 0.1;
const TAIL_ANSWERS: f64 = 4.0;
/// Slices the tail is cut into.
const TAIL_ATOMS: usize = 8;

/// A length's bin.
fn bin(tokens: f64) -> usize {
    ((tokens.max(1.0).ln() / LONGEST.ln() * BINS as f64) as usize).min(BINS - 1)
}

/// A bin's middle, in tokens.
fn middle(bin: usize) -> f64 {
    LONGEST.powf((bin as f64 + 0.5) / BINS as f64)
}

/// Lengths seen, and lengths exceeded.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    whole: Vec<f64>,
    /// Tokens of the whole answers of each bin.
    tokens: Vec<f64>,
    open: Vec<f64>,
    /// Answers cannot be longer.
    cap: f64,
}

impl Seen {
    /// Nothing seen yet of answers that end at `cap` at the latest.
    pub fn new(cap: usize) -> Self {
        Self { whole: vec![0.0; BINS], tokens: vec![0.0; BINS], open: vec![0.0; BINS], cap: cap.max(1) as f64 }
    }

    /// An answer of this length.
    pub fn whole(&mut self, tokens: f64) {
        let tokens = tokens.min(self.cap);
        self.whole[bin(tokens)] += 1.0;
        self.tokens[bin(tokens)] += tokens;
    }

    /// An answer longer than this.
    pub fn open(&mut self, tokens: f64) {
        if tokens >= self.cap {
            self.whole(self.cap);
        } else {
            self.open[bin(tokens)] += 1.0;
        }
    }

    /// Whole answers.
    pub fn answers(&self) -> f64 {
        self.whole.iter().sum()
    }

    /// Mean length if it were exponential: all tokens there are, over the answers that are whole. Robust where most are
    /// still in flight; `prior` counts as one answer.
    fn scale(&self, whole: &[f64], open: &[f64], prior: Option<f64>) -> f64 {
        let (mut tokens, mut answers) = (prior.unwrap_or(0.0), if prior.is_some() { 1.0 } else { 0.0 });
        for b in 0..BINS {
            tokens += (whole[b] + open[b]) * self.value(b);
            answers += whole[b];
        }
        if answers > 0.0 { (tokens / answers).min(self.cap) } else { self.cap / 4.0 }
    }

    fn value(&self, b: usize) -> f64 {
        if self.whole[b] > 0.0 { self.tokens[b] / self.whole[b] } else { middle(b).min(self.cap) }
    }

    /// The estimate as it stands.
    pub fn lengths(&self, shape: Option<&Shape>) -> Lengths {
        self.weighed(&self.whole, &self.open, shape)
    }

    /// A draw of what the lengths may truly be.
    pub fn draw(&self, rng: &mut impl Rng, shape: Option<&Shape>) -> Lengths {
        // Few answers of a heavy tail tell less than their number: the bootstrap takes them for fewer.
        let trust = self.answers().max(1.0) / (self.answers().max(1.0) + FEW);
        let mut weigh = |counts: &[f64]| -> Vec<f64> {
            let weight = |&n: &f64| match Gamma::new(n * trust, 1.0 / trust) {
                Ok(gamma) if n > 0.0 => gamma.sample(rng),
                _ => 0.0,
            };
            counts.iter().map(weight).collect()
        };
        let (whole, open) = (weigh(&self.whole), weigh(&self.open));
        self.weighed(&whole, &open, shape)
    }

    /// Kaplan-Meier over weighed observations; `shape` counts as [`POOLED`] answers more.
    fn weighed(&self, whole: &[f64], open: &[f64], shape: Option<&Shape>) -> Lengths {
        // Value, answers that end there, answers that are open there.
        let mut events: Vec<(f64, f64, f64)> = (0..BINS)
            .filter(|&b| whole[b] > 0.0 || open[b] > 0.0)
            .map(|b| (self.value(b), whole[b], open[b]))
            .collect();
        let scale = self.scale(whole, open, shape.map(|s| s.mean));
        let excess = self.excess(&events, shape.map_or(scale, |s| s.excess * scale));
        if let Some(shape) = shape {
            let like = |&(ratio, mass): &(f64, f64)| ((ratio * scale).min(self.cap), mass * POOLED, 0.0);
            events.extend(shape.atoms.iter().map(like));
            events.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        let mut at_risk: f64 = events.iter().map(|e| e.1 + e.2).sum();
        let mut left = 1.0;
        let mut atoms: Vec<(f64, f64)> = Vec::new();
        for &(value, ends, opens) in &events {
            // Those in flight leave in the middle of their bin (the actuarial way).
            let risk = at_risk - opens / 2.0;
            if ends > 0.0 && risk > 0.0 {
                let mass = left * (ends / risk).min(1.0);
                atoms.push((value, mass));
                left -= mass;
            }
            at_risk -= ends + opens;
        }
        let last = events.last().map_or(0.0, |e| e.0);
        if left > 1e-9 {
            // The tail in slices of equal probability, each at its middle.
            atoms.extend((0..TAIL_ATOMS).map(|i| {
                let share = 1.0 - (i as f64 + 0.5) / TAIL_ATOMS as f64;
                ((last - excess * share.ln()).min(self.cap), left / TAIL_ATOMS as f64)
            }));
        }
        Lengths { atoms, excess, cap: self.cap }
    }

    /// Mean excess over a long length: the tokens beyond it, of answers in flight too, over the answers that end there.
    /// `prior` counts as [`POOLED`] answers.
    fn excess(&self, events: &[(f64, f64, f64)], prior: f64) -> f64 {
        let all: f64 = events.iter().map(|e| e.1).sum();
        let (mut ends, mut moment, mut weight) = (0.0, 0.0, 0.0);
        let mut from = 0.0;
        for &(value, whole, open) in events.iter().rev() {
            from = value;
            if ends >= (TAIL_SHARE * all).max(TAIL_ANSWERS) {
                break;
            }
            ends += whole;
            weight += whole + open;
            moment += (whole + open) * value;
        }
        (((moment - weight * from) + POOLED * prior) / (ends + POOLED)).max(1.0)
    }
}

/// What the datasets' lengths have in common, as multiples of each one's own mean.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// Multiple and probability, ascending.
    atoms: Vec<(f64, f64)>,
    /// Mean excess of the longest.
    excess: f64,
    /// Mean length of a dataset, in tokens.
    mean: f64,
}

impl Shape {
    /// Of several datasets, each with the number of answers wanted of it.
    pub fn of(all: &[(&Seen, f64)]) -> Self {
        let mut bins = vec![0.0; BINS];
        let (mut mean, mut excess, mut total) = (0.0, 0.0, 0.0);
        for (seen, wanted) in all.iter().filter(|(seen, _)| seen.answers() > 0.0) {
            let scale = seen.scale(&seen.whole, &seen.open, None);
            let lengths = seen.lengths(None);
            let weight = wanted * seen.answers().min(64.0);
            for &(value, mass) in &lengths.atoms {
                // The bins are for tokens; a thousand stand for the mean.
                bins[bin(value / scale * 1000.0)] += mass * weight;
            }
            mean += weight * scale;
            excess += weight * lengths.excess / scale;
            total += weight;
        }
        if total <= 0.0 {
            // Nothing is through: exponential, of a length that caps suggest.
            let mean = all.iter().map(|(seen, _)| seen.cap / 4.0).sum::<f64>() / all.len().max(1) as f64;
            return Self { atoms: vec![], excess: 1.0, mean };
        }
        let atoms = bins.iter().enumerate().filter(|(_, mass)| **mass > 0.0);
        let atoms = atoms.map(|(b, mass)| (middle(b) / 1000.0, mass / total)).collect();
        Self { atoms, excess: excess / total, mean: mean / total }
    }
}

/// A distribution of lengths.
#[derive(Debug, Clone, PartialEq)]
pub struct Lengths {
    /// Length and probability, ascending.
    atoms: Vec<(f64, f64)>,
    /// Mean excess of the longest.
    excess: f64,
    cap: f64,
}

impl Lengths {
    /// Expected tokens beyond a length that is exceeded, by the exponential tail, which ends at the cap.
    fn beyond(&self, length: f64) -> f64 {
        let room = (self.cap - length).max(0.0);
        self.excess * (1.0 - (-room / self.excess.max(1.0)).exp())
    }

    /// Mean answer under a cap.
    pub fn mean(&self, cap: f64) -> f64 {
        self.atoms.iter().map(|&(value, mass)| mass * value.min(cap)).sum()
    }

    /// Variance of an answer under a cap.
    pub fn variance(&self, cap: f64) -> f64 {
        let mean = self.mean(cap);
        self.atoms.iter().map(|&(value, mass)| mass * (value.min(cap) - mean).powi(2)).sum()
    }

    /// Expected tokens still to come of an answer that has so many.
    pub fn residual(&self, tokens: f64, cap: f64) -> f64 {
        let above = self.atoms.iter().rev().take_while(|a| a.0 > tokens);
        let (mass, moment) = above.fold((0.0, 0.0), |(m, s), &(v, p)| (m + p, s + p * (v.min(cap) - tokens).max(0.0)));
        if mass > 1e-9 { moment / mass } else { self.beyond(tokens).min((cap - tokens).max(0.0)) }
    }

    /// Share of answers longer than so many tokens.
    pub fn share_above(&self, tokens: f64) -> f64 {
        self.atoms.iter().rev().take_while(|a| a.0 > tokens).map(|a| a.1).sum()
    }

    /// A length at random among those longer than `tokens`.
    pub fn sample(&self, rng: &mut impl Rng, tokens: f64) -> f64 {
        let from = self.atoms.partition_point(|a| a.0 <= tokens);
        let mut at = rng.random::<f64>() * self.atoms[from..].iter().map(|a| a.1).sum::<f64>();
        for &(value, mass) in &self.atoms[from..] {
            at -= mass;
            if at <= 0.0 {
                return value;
            }
        }
        self.atoms.last().map_or(self.cap, |a| a.0).max(tokens + self.beyond(tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn nothing_in_flight_is_the_plain_mean() {
        let mut seen = Seen::new(10_000);
        [100.0, 300.0, 800.0, 4000.0].into_iter().for_each(|n| seen.whole(n));
        let lengths = seen.lengths(None);
        assert!((lengths.mean(f64::MAX) - 1300.0).abs() < 1e-6);
        assert!((lengths.mean(500.0) - 350.0).abs() < 1e-6);
        assert!((lengths.share_above(500.0) - 0.5).abs() < 1e-9);
        assert!((lengths.residual(500.0, f64::MAX) - 1900.0).abs() < 1e-6);
        // Kaplan and Meier by hand: two end at 1 and 3, one is open at 2: masses 1/3 and 2/3.
        let mut seen = Seen::new(100);
        seen.whole(1.0);
        seen.open(20.0);
        seen.whole(30.0);
        let masses: Vec<f64> = seen.lengths(None).atoms.iter().map(|a| a.1).collect();
        assert!((masses[0] - 1.0 / 3.0).abs() < 1e-9 && (masses[1] - 2.0 / 3.0).abs() < 1e-9, "{masses:?}");
    }

    #[test]
    fn answers_in_flight_correct_the_mean_of_early_finishes() {
        // Exponential lengths of mean 1000, watched for 600 tokens: the whole ones average 251, the truth is 1000.
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut seen = Seen::new(100_000);
        let (mut whole, mut count) = (0.0, 0.0);
        for i in 0..4000 {
            let length = -1000.0 * (1.0 - rng.random::<f64>()).ln();
            // The watch began at different times.
            let watched = 600.0 + f64::from(i % 7) * 300.0;
            if length <= watched {
                seen.whole(length);
                (whole, count) = (whole + length, count + 1.0);
            } else {
                seen.open(watched);
            }
        }
        let mean = seen.lengths(None).mean(f64::MAX);
        assert!(whole / count < 700.0 && (mean - 1000.0).abs() < 60.0, "{} {mean}", whole / count);
    }

    #[test]
    fn a_cap_is_an_end_and_a_tail_ends_at_it() {
        let mut seen = Seen::new(1000);
        seen.whole(500.0);
        seen.open(5000.0);
        assert_eq!(seen.answers(), 2.0);
        let mut seen = Seen::new(1000);
        seen.open(900.0);
        let lengths = seen.lengths(None);
        assert!(lengths.mean(f64::MAX) <= 1000.0 && lengths.residual(990.0, f64::MAX) <= 10.0);
    }
}
