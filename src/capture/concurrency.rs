//! How many requests a server gets at once: enough that its KV cache is full, few enough that little queues.
//!
//! More in flight than the cache has room for only queues at the server, or worse, is thrown out half done and computed
//! again. Less leaves it idle. `auto` looks at what runs and what waits each second; a server that does not tell is judged
//! by how many requests have no first token yet, and one that does not even stream by its tokens a second.

use super::engine::{Load, ServerFacts};

/// What a second showed of one server.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Seen {
    /// Seconds since the run began.
    pub now: f64,
    /// Requests we have there.
    pub in_flight: usize,
    /// Those of them without a first token for longer than a prefill takes; `None` where answers do not stream.
    pub silent: Option<usize>,
    /// What the server says.
    pub load: Option<Load>,
    /// Output tokens received from it so far.
    pub tokens: f64,
    /// KV tokens a running request holds on average: its prompt, and of its answer what is there at a random moment.
    pub resident: f64,
}

/// The limit on one server's requests.
#[derive(Debug, Clone)]
pub struct Auto {
    limit: f64,
    kv_tokens: Option<f64>,
    max_running: Option<f64>,
    /// Preemptions seen so far.
    preempted: Option<u64>,
    /// Running more than this brought preemptions, until `.1`.
    ceiling: Option<(f64, f64)>,
    climb: Climb,
}

/// For servers that show nothing: climbs towards more tokens a second.
#[derive(Debug, Clone, Default)]
struct Climb {
    since: f64,
    tokens: f64,
    rate: f64,
    factor: f64,
}

/// Requests that may wait at the server, so that a slot that falls free is filled at once: two, or this share.
const QUEUE_SHARE: f64 = 0.08;
/// The cache's size goes by a forecast of lengths, which may be off by this factor before preemptions correct it.
const SLACK: f64 = 1.15;
/// Seconds that a ceiling holds before it is tried to raise it.
const HOLD: f64 = 20.0;

impl Auto {
    /// A limit for a server of which only its facts are known. `resident` as in [`Seen`], guessed.
    pub fn new(facts: &ServerFacts, resident: f64) -> Self {
        let kv_tokens = facts.kv_tokens.map(|n| n as f64);
        let max_running = facts.max_running.map(|n| n as f64);
        let room = kv_tokens.map_or(8.0, |kv| kv / resident.max(1.0));
        let limit = room.min(max_running.unwrap_or(64.0)).clamp(4.0, 64.0);
        let climb = Climb { factor: 1.25, ..Climb::default() };
        Self { limit, kv_tokens, max_running, preempted: None, ceiling: None, climb }
    }

    /// Requests the server may have now.
    pub fn limit(&self) -> usize {
        self.limit.round().max(1.0) as usize
    }

    /// Requests the cache has room for, by the forecast of lengths.
    pub fn room(&self, resident: f64) -> Option<f64> {
        self.kv_tokens.map(|kv| kv / resident.max(1.0))
    }

    /// Takes in a second's sight.
    pub fn tick(&mut self, seen: &Seen) {
        let waiting = match (seen.load, seen.silent) {
            (Some(load), _) => load.waiting,
            (None, Some(silent)) => silent,
            (None, None) => return self.climb(seen),
        };
        let running = seen.load.map_or_else(|| seen.in_flight.saturating_sub(waiting), |load| load.running);
        let band = (running as f64 * QUEUE_SHARE).ceil().max(2.0);
        if self.thrown_out(seen.load) {
            let ceiling = (running as f64 * 0.92).max(1.0);
            self.ceiling = Some((self.ceiling.map_or(ceiling, |(c, _)| c.min(ceiling)), seen.now + HOLD));
        } else if let Some((ceiling, until)) = &mut self.ceiling
            && seen.now > *until
        {
            *ceiling *= 1.03;
            *until = seen.now + HOLD / 4.0;
        }
        if waiting as f64 > band {
            // What waits was sent too early; what runs now, and the band behind it, is what fits.
            self.limit = self.limit.min(running as f64 + band);
        } else if waiting == 0 && seen.in_flight + 1 >= self.limit() {
            self.limit += (self.limit * 0.15).max(1.0);
        }
        let forecast = self.room(seen.resident).map(|room| room * SLACK + band);
        let most = [forecast, self.max_running.map(|n| n + band), self.ceiling.map(|(c, _)| c)];
        let most = most.into_iter().flatten().fold(f64::INFINITY, f64::min);
        // One at least: a cache that is smaller than a request must still serve it.
        self.limit = self.limit.min(most).max(1.0);
    }

    /// Whether the server threw requests out since the last look.
    fn thrown_out(&mut self, load: Option<Load>) -> bool {
        let Some(now) = load.and_then(|load| load.preempted) else { return false };
        self.preempted.replace(now).is_some_and(|before| now > before)
    }

    /// Without any sight of the queue: keeps changing the limit the way that raised the rate, over windows long enough
    /// that a few times the limit's requests fit in.
    fn climb(&mut self, seen: &Seen) {
        let span = seen.now - self.climb.since;
        let tokens = seen.tokens - self.climb.tokens;
        if span < 10.0 || tokens < 2.0 * self.limit * seen.resident {
            return;
        }
        let rate = tokens / span;
        if rate < self.climb.rate * 1.02 {
            self.climb.factor = 1.0 / self.climb.factor.powf(0.8);
        }
        self.climb = Climb { since: seen.now, tokens: seen.tokens, rate, factor: self.climb.factor };
        self.limit = (self.limit * self.climb.factor).clamp(1.0, 4096.0);
    }
}

/// KV tokens that a running request holds on average, from answer lengths: at a random moment a request is the more
/// likely to be seen the longer it is, so its answer is there to E[L²] / 2 E[L], not to E[L] / 2 (renewal theory).
pub fn resident(prompt_mean: f64, lengths: impl Iterator<Item = f64>, fallback: f64) -> f64 {
    let (mut sum, mut squares) = (0.0, 0.0);
    for length in lengths {
        sum += length;
        squares += length * length;
    }
    prompt_mean + if sum > 0.0 { squares / (2.0 * sum) } else { fallback }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(kv_tokens: Option<usize>) -> ServerFacts {
        ServerFacts { kv_tokens, ..ServerFacts::default() }
    }

    fn seen(now: f64, running: usize, waiting: usize, in_flight: usize, preempted: u64) -> Seen {
        let load = Some(Load { running, waiting, kv_use: None, preempted: Some(preempted) });
        Seen { now, in_flight, load, resident: 2000.0, ..Seen::default() }
    }

    #[test]
    fn what_queues_is_not_sent_again() {
        let mut auto = Auto::new(&facts(Some(200_000)), 2000.0);
        // Room for fifty by the cache, but the server runs only twenty.
        for second in 0..30 {
            let sent = auto.limit();
            auto.tick(&seen(second as f64, sent.min(20), sent.saturating_sub(20), sent, 0));
        }
        assert!((20..=24).contains(&auto.limit()), "{}", auto.limit());
    }

    #[test]
    fn an_idle_cache_is_filled_up_to_its_room() {
        let mut auto = Auto::new(&facts(Some(200_000)), 20_000.0);
        assert_eq!(auto.limit(), 10);
        for second in 0..60 {
            auto.tick(&seen(second as f64, auto.limit(), 0, auto.limit(), 0));
        }
        assert!((100..=130).contains(&auto.limit()), "{}", auto.limit());
    }

    #[test]
    fn preemptions_lower_it() {
        let mut auto = Auto::new(&facts(None), 2000.0);
        for second in 0..30 {
            auto.tick(&seen(second as f64, auto.limit(), 0, auto.limit(), 0));
        }
        let before = auto.limit();
        auto.tick(&seen(30.0, before, 0, before, 1));
        assert!(auto.limit() < before);
        let lowered = auto.limit();
        for second in 31..200 {
            auto.tick(&seen(second as f64, auto.limit(), 0, auto.limit(), 1));
        }
        assert!(auto.limit() > lowered, "it is tried again after a while");
    }

    #[test]
    fn a_server_that_shows_nothing_is_climbed() {
        let mut auto = Auto::new(&facts(None), 100.0);
        let mut tokens = 0.0;
        for second in 0..1200 {
            // Saturates at forty in flight.
            tokens += 10.0 * (auto.limit() as f64).min(40.0);
            auto.tick(&Seen {
                now: second as f64,
                in_flight: auto.limit(),
                tokens,
                resident: 100.0,
                ..Seen::default()
            });
        }
        assert!(auto.limit() >= 32, "{}", auto.limit());
    }

    #[test]
    fn long_answers_weigh_more() {
        // The story's lengths: mean 1,416, deviation 1,640.
        let lengths = [1416.0 - 1640.0f64, 1416.0 + 1640.0];
        let held = resident(0.0, lengths.into_iter(), 0.0);
        assert!((held - 1657.7).abs() < 1.0, "{held}");
    }
}
