//! A server simulated: requests share its tokens a second, those beyond its KV room queue.
//!
//! The forecast plays the end of a run through it, where fewer are in flight than there is room for; tests play whole
//! runs and see whether the forecast was right.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use rand::Rng;
use rand_distr::{Distribution, StandardNormal};

/// One answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    pub group: usize,
    /// Which limit counts it.
    pub class: usize,
    pub prompt_tokens: f64,
    pub tokens: f64,
}

/// A server.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Requests that run at once; the rest queue.
    pub room: usize,
    /// Tokens a second with the room full.
    pub rate: f64,
    /// With `n` running it makes `rate (n / room)^alpha`.
    pub alpha: f64,
    /// Work of a prompt token, in output tokens.
    pub prompt_cost: f64,
    /// Standard deviation of the rate's logarithm, which wanders.
    pub noise: f64,
    /// Seconds over which it forgets where it was.
    pub noise_s: f64,
}

/// A request at the server.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Flight {
    pub work: Work,
    pub asked: f64,
    /// Output tokens so far.
    pub tokens: f64,
}

/// An answer that is through.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Done {
    pub work: Work,
    pub asked: f64,
    pub at: f64,
}

/// Time ordered, for a heap.
#[derive(Debug, Clone, Copy, PartialEq)]
struct At(f64);
impl Eq for At {}
impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for At {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// A run in progress.
pub struct Simulation<R> {
    machine: Machine,
    rng: R,
    /// Requests each class may have there.
    limits: Vec<usize>,
    in_class: Vec<usize>,
    /// Running requests by the work at which each ends, on a clock that counts work per request.
    running: BinaryHeap<Reverse<(At, usize)>>,
    queue: VecDeque<usize>,
    flights: Vec<Option<(Work, f64, f64)>>,
    free: Vec<usize>,
    clock: f64,
    /// Logarithm of the rate's present factor, and until when it holds.
    factor: (f64, f64),
    /// Seconds since the run began.
    pub now: f64,
    /// Output tokens made so far, those of answers in flight too.
    pub tokens: f64,
    /// Prompt tokens of answers that are through.
    pub prompt_tokens: f64,
}

impl<R: Rng> Simulation<R> {
    /// A server with nothing to do.
    pub fn new(machine: Machine, limits: Vec<usize>, mut rng: R) -> Self {
        let first: f64 = rng.sample(StandardNormal);
        Self {
            machine,
            in_class: vec![0; limits.len()],
            limits,
            running: BinaryHeap::new(),
            queue: VecDeque::new(),
            flights: Vec::new(),
            free: Vec::new(),
            clock: 0.0,
            factor: (first * machine.noise, 0.0),
            now: 0.0,
            tokens: 0.0,
            prompt_tokens: 0.0,
            rng,
        }
    }

    /// Whether a class may send one more.
    pub fn may(&self, class: usize) -> bool {
        self.in_class[class] < self.limits[class]
    }

    /// Requests at the server.
    pub fn in_flight(&self) -> usize {
        self.running.len() + self.queue.len()
    }

    /// Sends one.
    pub fn send(&mut self, work: Work) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.flights.push(None);
            self.flights.len() - 1
        });
        self.flights[slot] = Some((work, self.now, f64::NAN));
        self.in_class[work.class] += 1;
        self.queue.push_back(slot);
        self.admit();
    }

    fn admit(&mut self) {
        while self.running.len() < self.machine.room {
            let Some(slot) = self.queue.pop_front() else { return };
            if let Some((work, _, begun)) = &mut self.flights[slot] {
                *begun = self.clock;
                let end = self.clock + work.tokens + self.machine.prompt_cost * work.prompt_tokens;
                self.running.push(Reverse((At(end), slot)));
            }
        }
    }

    /// Work a second of each running request.
    fn speed(&self) -> f64 {
        let n = self.running.len() as f64;
        let share = n / self.machine.room as f64;
        self.machine.rate * share.powf(self.machine.alpha) * self.factor.0.exp() / n
    }

    /// Runs until the next answer is through; `None` when nothing is there.
    pub fn step(&mut self) -> Option<Done> {
        loop {
            let &Reverse((At(end), slot)) = self.running.peek()?;
            let speed = self.speed();
            let needed = (end - self.clock).max(0.0) / speed;
            // The rate wanders in steps of a tenth of its memory.
            let until = if self.machine.noise > 0.0 { self.factor.1 - self.now } else { f64::MAX };
            let seconds = needed.min(until.max(0.0));
            let running = self.running.len() as f64;
            self.clock += seconds * speed;
            self.now += seconds;
            // Work on prompts makes no output; it is taken off when the answer is through.
            self.tokens += seconds * speed * running;
            if needed > until {
                let keep = (-0.1f64).exp();
                let fresh: f64 = StandardNormal.sample(&mut self.rng);
                self.factor.0 = keep * self.factor.0 + (1.0 - keep * keep).sqrt() * self.machine.noise * fresh;
                self.factor.1 = self.now + self.machine.noise_s / 10.0;
                continue;
            }
            self.running.pop();
            let (work, asked, _) = self.flights[slot].take()?;
            self.free.push(slot);
            self.in_class[work.class] -= 1;
            self.tokens -= self.machine.prompt_cost * work.prompt_tokens;
            self.prompt_tokens += work.prompt_tokens;
            self.admit();
            return Some(Done { work, asked, at: self.now });
        }
    }

    /// What is at the server, queued ones with no tokens.
    pub fn flights(&self) -> Vec<Flight> {
        let all = self.flights.iter().flatten();
        all.map(|&(work, asked, begun)| {
            let made = if begun.is_nan() { 0.0 } else { self.clock - begun };
            let tokens = (made - self.machine.prompt_cost * work.prompt_tokens).clamp(0.0, work.tokens);
            Flight { work, asked, tokens }
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn requests_share_and_queue() {
        let machine = Machine { room: 2, rate: 20.0, alpha: 1.0, prompt_cost: 0.0, noise: 0.0, noise_s: 1.0 };
        let mut server = Simulation::new(machine, vec![3], ChaCha8Rng::seed_from_u64(1));
        let work = |tokens| Work { group: 0, class: 0, prompt_tokens: 5.0, tokens };
        [100.0, 50.0, 20.0].into_iter().for_each(|n| server.send(work(n)));
        assert!(!server.may(0));
        // Ten tokens a second each: 50 tokens in 5 s, then the queued one beside the first: 20 tokens in 2 s.
        assert_eq!(server.step().unwrap().at, 5.0);
        assert_eq!(server.flights().iter().map(|f| f.tokens).collect::<Vec<_>>(), [50.0, 0.0]);
        assert_eq!(server.step().unwrap().at, 7.0);
        // One alone, at half the rate: its own speed is the same.
        assert_eq!(server.step().unwrap().at, 10.0);
        assert!((server.tokens - 170.0).abs() < 1e-9 && server.step().is_none());
    }
}
