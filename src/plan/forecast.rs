//! Tokens and hours still to come, with a 90% interval.
//!
//! Time left is work left over work a second. Work left is answer lengths (`survival.rs`), dataset by dataset, times what
//! is still wanted, and the rest of what is in flight. Work a second is what the run showed; it is not taken as constant:
//! when a class is through, the others run on with fewer requests at another rate, and at the very end the last answers
//! run alone (`simulate.rs`). Every unknown is drawn [`DRAWS`] times; the estimate itself is by the best guess of each.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal, StudentT};

use super::simulate::{Machine, Simulation, Work};
use super::survival::{Lengths, Seen, Shape};
use super::{Setting, Span};
use crate::capture::status::{Observed, Pace};

/// Draws of everything unknown.
pub const DRAWS: usize = 400;
/// Simulated ends of the run.
const ENDS: usize = 32;
/// Pieces the run is cut into to see how steady its rate is.
const PIECES: usize = 8;
/// Work of a prompt token in output tokens: prefill is cheap, but how cheap no server tells.
const PROMPT_COST: (f64, f64) = (0.03, 0.3);
/// With `n` running a server makes about `n^alpha` tokens a second until its KV cache is full.
const ALPHA: (f64, f64) = (0.3, 0.9);
/// Rates wander more than a short look shows: logarithmic deviation added at once, and the seconds of looking that
/// bring it down to 0.7 of it.
const DRIFT: (f64, f64) = (0.06, 1800.0);

/// What may still change: caps, numbers, speed.
#[derive(Debug, Clone, PartialEq)]
pub struct Scenario {
    /// Of each group: its cap, and how many answers more it gets (those in flight are among them).
    pub groups: Vec<(f64, f64)>,
    /// Times the present rate.
    pub speed: f64,
    /// Requests that run at once, where it is another number than now.
    pub running: Option<f64>,
    /// Share of the work on prompts that remains.
    pub prompts: f64,
}

/// One draw of all that is unknown.
struct Draw {
    lengths: Vec<Lengths>,
    /// Work a second as things stand.
    rate: Option<f64>,
    prompt_cost: f64,
    alpha: f64,
    /// How the answers to come differ from their mean: standard normal, of each group.
    luck: Vec<f64>,
    /// Seconds that the end takes longer than its work at the full rate.
    end: f64,
}

/// One class and dataset.
struct Group {
    cap: f64,
    done: f64,
    wanted: f64,
    tokens: f64,
    prompt: f64,
    /// Output tokens of each answer in flight.
    flights: Vec<f64>,
    /// Requests of its class in flight at most, where that is fixed: class and number.
    limit: Option<(String, f64)>,
}

/// A fitted run.
pub struct Model {
    groups: Vec<Group>,
    best: Draw,
    draws: Vec<Draw>,
    /// Requests running now, as far as known.
    running: f64,
    /// Requests that may be in flight in all.
    total: f64,
    /// Seconds the run has taken so far.
    pub spent_s: f64,
}

/// Outcome of a scenario.
#[derive(Debug, Clone, PartialEq)]
pub struct Outlook {
    /// Hours from now; `None` where no rate is known.
    pub hours: Option<Span>,
    /// Output tokens in all, those that are there too.
    pub tokens: Span,
    /// Hours of each draw, in the order drawn: the same draw of two scenarios is the same luck.
    pub draws: Vec<f64>,
    /// Of each group: tokens in all, and hours its part takes.
    pub groups: Vec<(Span, Option<Span>)>,
}

impl Model {
    /// Fits what was observed. `draws` is [`DRAWS`], or fewer where it must be quick.
    pub fn fit(observed: &Observed, setting: &Setting, draws: usize) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let speed = token_speed(observed);
        let groups: Vec<Group> = (0..observed.groups.len()).map(|g| group(observed, setting, g, speed)).collect();
        let seen: Vec<Seen> = (0..groups.len()).map(|g| lengths_seen(observed, g, &groups[g])).collect();
        let wanted: Vec<(&Seen, f64)> = seen.iter().zip(&groups).map(|(s, g)| (s, g.wanted)).collect();
        let shape = Shape::of(&wanted);
        let total = observed.pace.last().map_or(0, |p| p.in_flight).max(observed.flights.len()) as f64;
        let running = setting.running.unwrap_or(total).max(1.0);
        let paces = match observed.streaming && observed.pace.len() > 2 {
            true => observed.pace.clone(),
            false => paces_from_answers(observed, &groups, speed),
        };
        let (rate, spread) = rate(&paces, (PROMPT_COST.0 * PROMPT_COST.1).sqrt());
        let best = Draw {
            lengths: seen.iter().map(|s| s.lengths(Some(&shape))).collect(),
            rate,
            prompt_cost: (PROMPT_COST.0 * PROMPT_COST.1).sqrt(),
            alpha: (ALPHA.0 + ALPHA.1) / 2.0,
            luck: vec![0.0; groups.len()],
            end: 0.0,
        };
        let slots = setting.limit.unwrap_or(total).max(total).max(1.0);
        let slots = setting.running.map_or(slots, |running| slots.min(running.max(1.0)));
        let mut model = Self { groups, best, draws: vec![], running, total: slots, spent_s: spent(&paces) };
        let ends: Vec<f64> = (0..ENDS).map(|_| model.end(&mut rng)).collect();
        model.best.end = ends.iter().sum::<f64>() / ends.len() as f64;
        let unseen = DRIFT.0 * (DRIFT.1 / (DRIFT.1 + model.spent_s)).sqrt();
        let student = StudentT::new((PIECES - 1) as f64).ok();
        model.draws = (0..draws)
            .map(|_| {
                let prompt_cost = (rng.random_range(PROMPT_COST.0.ln()..PROMPT_COST.1.ln())).exp();
                let t = student.map_or(0.0, |s| s.sample(&mut rng));
                let drift: f64 = StandardNormal.sample(&mut rng);
                let rate = self::rate(&paces, prompt_cost).0.map(|r| r * (spread * t + unseen * drift).exp());
                Draw {
                    lengths: seen.iter().map(|s| s.draw(&mut rng, Some(&shape))).collect(),
                    rate,
                    prompt_cost,
                    alpha: rng.random_range(ALPHA.0..ALPHA.1),
                    luck: (0..seen.len()).map(|_| StandardNormal.sample(&mut rng)).collect(),
                    end: ends[rng.random_range(0..ends.len())],
                }
            })
            .collect();
        model
    }

    /// All as it stands.
    pub fn as_is(&self) -> Scenario {
        let groups = self.groups.iter().map(|g| (g.cap, (g.wanted - g.done).max(0.0))).collect();
        Scenario { groups, speed: 1.0, running: None, prompts: 1.0 }
    }

    /// Best guess of a group's lengths.
    pub fn lengths(&self, group: usize) -> &Lengths {
        &self.best.lengths[group]
    }

    /// Best guess of the work a second.
    pub fn rate(&self) -> Option<f64> {
        self.best.rate
    }

    /// Requests running now and those that may be in flight, as the forecast takes them.
    pub fn running(&self) -> (f64, f64) {
        (self.running, self.total)
    }

    /// What comes of a scenario.
    pub fn outlook(&self, scenario: &Scenario) -> Outlook {
        let best = self.play(&self.best, scenario);
        let all: Vec<Played> = self.draws.iter().map(|draw| self.play(draw, scenario)).collect();
        let groups = (0..self.groups.len())
            .map(|g| {
                let tokens = Span::of(best.groups[g].0, all.iter().map(|p| p.groups[g].0));
                let hours = best.groups[g].1.map(|h| Span::of(h, all.iter().filter_map(|p| p.groups[g].1)));
                (tokens, hours)
            })
            .collect();
        let tokens = Span::of(best.tokens, all.iter().map(|p| p.tokens));
        let draws: Vec<f64> = all.iter().filter_map(|p| p.hours).collect();
        Outlook { hours: best.hours.map(|h| Span::of(h, draws.iter().copied())), tokens, draws, groups }
    }

    fn play(&self, draw: &Draw, scenario: &Scenario) -> Played {
        let mut work = vec![(0.0, 0.0); self.groups.len()];
        let mut groups = Vec::with_capacity(self.groups.len());
        for (g, group) in self.groups.iter().enumerate() {
            let (cap, more) = scenario.groups[g];
            let lengths = &draw.lengths[g];
            let (flying, tokens): (f64, f64) =
                group.flights.iter().take(more as usize).fold((0.0, 0.0), |(n, t), &f| {
                    let ends = cap.max(f);
                    (n + 1.0, t + f + lengths.residual(f, ends))
                });
            let fresh = (more - flying).max(0.0);
            let noise = draw.luck[g] * (more * lengths.variance(cap)).sqrt();
            let come = (tokens + fresh * lengths.mean(cap) + noise).max(0.0);
            let made: f64 = group.flights.iter().take(more as usize).sum();
            work[g] = ((come - made).max(0.0) + fresh * draw.prompt_cost * group.prompt * scenario.prompts, more);
            groups.push((group.tokens + come, None));
        }
        let all: f64 = work.iter().map(|w| w.0).sum();
        let hours = draw.rate.map(|rate| {
            let left = if all > 0.0 { draw.end.max(0.0) } else { 0.0 };
            let room = scenario.running.map_or(1.0, |running| (running / self.running).powf(draw.alpha));
            (self.drain(&work, rate, draw.alpha).0 + left) / (scenario.speed * room) / 3600.0
        });
        if let Some(hours) = hours {
            groups.iter_mut().zip(&work).for_each(|(group, work)| group.1 = Some(hours * work.0 / all.max(1e-9)));
        }
        Played { tokens: groups.iter().map(|g| g.0).sum(), hours, groups }
    }

    /// Seconds until all classes are through: each takes its share of the server, and when one is through the others go
    /// on at the rate of fewer running. `work` holds each group's work and the answers it is of.
    ///
    /// Tells also what the last to be through are: their class's name, where its number is fixed, how many of them run,
    /// and at which rate.
    fn drain<'a>(&'a self, work: &[(f64, f64)], rate: f64, alpha: f64) -> (f64, (Option<&'a str>, f64, f64)) {
        let mut parts: Vec<Part> = Vec::new();
        for (group, &(work, answers)) in self.groups.iter().zip(work) {
            let (class, sent) = group.limit.as_ref().map_or((None, 0.0), |(name, n)| (Some(name.as_str()), *n));
            match parts.iter_mut().find(|p| p.class == class) {
                Some(part) => (part.work, part.answers) = (part.work + work, part.answers + answers),
                None => parts.push(Part { class, sent, work, answers }),
            }
        }
        parts.retain(|p| p.work > 0.0 && p.answers > 0.0);
        let fixed: f64 = parts.iter().map(|p| p.sent).sum();
        // Those without a number of their own are one part, and have what the others leave.
        parts.iter_mut().filter(|p| p.class.is_none()).for_each(|p| p.sent = (self.total - fixed).max(1.0));
        let room = self.running;
        let now = parts.iter().map(|p| p.sent).sum::<f64>().min(room).max(1.0);
        let lengths: Vec<(Option<&str>, f64)> = parts.iter().map(|p| (p.class, p.work / p.answers)).collect();
        let (mut seconds, mut last) = (0.0, (None, room.min(self.total), rate));
        while !parts.is_empty() {
            let of = |part: &Part| lengths.iter().find(|l| l.0 == part.class).map_or(1.0, |l| l.1);
            let sent: Vec<(f64, f64)> = parts.iter().map(|p| (p.sent, of(p))).collect();
            let running = running(&sent, room);
            let all: f64 = running.iter().sum();
            let rate = rate * (all / now).powf(alpha);
            let first = parts.iter().zip(&running).map(|(p, n)| p.work * all / (n * rate)).fold(f64::MAX, f64::min);
            seconds += first;
            last = (parts[0].class, all, rate);
            parts.iter_mut().zip(&running).for_each(|(p, n)| p.work -= first * rate * n / all);
            parts.retain(|p| p.work > 1e-6);
        }
        (seconds, last)
    }

    /// How much longer a simulated end takes than its work at the full rate would, in seconds: the last answers of the
    /// class that is through last.
    fn end(&self, rng: &mut ChaCha8Rng) -> f64 {
        let Some(rate) = self.best.rate else { return 0.0 };
        let lengths = &self.best.lengths;
        let left: Vec<f64> =
            self.groups.iter().map(|g| (g.wanted - g.done - g.flights.len() as f64).max(0.0)).collect();
        let work: Vec<(f64, f64)> = left.iter().zip(lengths).map(|(n, l)| (n * l.mean(f64::MAX), *n)).collect();
        let (_, (class, slots, rate)) = self.drain(&work, rate, self.best.alpha);
        let slots = (slots.round() as usize).clamp(1, 512);
        let last = |g: &Group| g.limit.as_ref().map(|l| l.0.as_str()) == class;
        let all: f64 = self.groups.iter().zip(&left).filter(|(g, _)| last(g)).map(|(_, n)| n).sum();
        let share = (8.0 * slots as f64 / all.max(1.0)).min(1.0);
        // What is in flight now is ahead of them, and ends where nothing else is left.
        let mut line: Vec<Work> = Vec::new();
        let mut behind: Vec<Work> = Vec::new();
        for (g, group) in self.groups.iter().enumerate().filter(|(_, group)| last(group)) {
            let job = |tokens: f64| Work { group: g, class: 0, prompt_tokens: 0.0, tokens: tokens.max(1.0) };
            for &made in &group.flights {
                line.push(job(lengths[g].sample(rng, made).min(group.cap) - made));
            }
            let mine = (left[g] * share).round() as usize;
            behind.extend((0..mine).map(|_| job(lengths[g].sample(rng, 0.0).min(group.cap))));
        }
        behind.sort_by(|a, b| lengths[b.group].mean(f64::MAX).total_cmp(&lengths[a.group].mean(f64::MAX)));
        line.extend(behind);
        let work: f64 = line.iter().map(|w| w.tokens).sum();
        let alpha = rng.random_range(ALPHA.0..ALPHA.1);
        let machine = Machine { room: slots, rate, alpha, prompt_cost: 0.0, noise: 0.0, noise_s: 1.0 };
        let mut server = Simulation::new(machine, vec![slots], ChaCha8Rng::seed_from_u64(rng.random()));
        let mut next = line.into_iter();
        loop {
            while server.may(0) {
                let Some(job) = next.next() else { break };
                server.send(job);
            }
            if server.step().is_none() {
                return (server.now - work / rate).max(0.0);
            }
        }
    }
}

/// Classes that share the server.
struct Part<'a> {
    class: Option<&'a str>,
    /// Requests in flight.
    sent: f64,
    work: f64,
    answers: f64,
}

/// How many of each class run where not all have room: of requests sent, and their mean work. All wait equally long in
/// the one queue, so those of the longer answers fill more of the room.
fn running(sent: &[(f64, f64)], room: f64) -> Vec<f64> {
    let at = |wait: f64| sent.iter().map(|(n, length)| n * length / (length + wait)).collect::<Vec<f64>>();
    let (mut low, mut high) = (0.0, 0.0);
    if sent.iter().map(|s| s.0).sum::<f64>() > room {
        high = sent.iter().map(|(n, length)| n * length).sum::<f64>() / room.max(1e-9);
        for _ in 0..40 {
            let wait = (low + high) / 2.0;
            if at(wait).iter().sum::<f64>() > room { low = wait } else { high = wait }
        }
    }
    at(high)
}

struct Played {
    tokens: f64,
    hours: Option<f64>,
    groups: Vec<(f64, Option<f64>)>,
}

fn group(observed: &Observed, setting: &Setting, g: usize, speed: f64) -> Group {
    let status = &observed.groups[g];
    let mine = observed.finished.iter().filter(|f| f.group == g);
    let (prompts, count) = mine.fold((0.0, 0.0), |(p, n), f| (p + f.prompt_tokens as f64, n + 1.0));
    let all = observed.finished.iter().map(|f| f.prompt_tokens as f64).sum::<f64>();
    let flights = observed.flights.iter().filter(|f| f.class == status.class && f.dataset == status.dataset);
    let known = |f: &crate::capture::status::InFlight| match observed.streaming {
        true => f.tokens as f64,
        false => (f.seconds * speed).min(f.max_tokens as f64 * 0.9),
    };
    let limit = setting.classes.get(&status.class).map(|&n| (status.class.clone(), n as f64));
    Group {
        cap: status.max_tokens.max(1) as f64,
        done: status.done as f64,
        wanted: (status.wanted.max(status.done)) as f64,
        tokens: status.tokens as f64,
        prompt: if count > 0.0 { prompts / count } else { all / observed.finished.len().max(1) as f64 },
        flights: flights.map(known).collect(),
        limit,
    }
}

/// Tokens a second of one request, its time in the queue counted.
fn token_speed(observed: &Observed) -> f64 {
    let timed = observed.finished.iter().filter(|f| f.seconds > 0.0);
    let (tokens, seconds) = timed.fold((0.0, 0.0), |(t, s), f| (t + f.tokens as f64, s + f.seconds));
    if seconds > 0.0 { tokens / seconds } else { 0.0 }
}

fn lengths_seen(observed: &Observed, g: usize, group: &Group) -> Seen {
    let mut seen = Seen::new(group.cap as usize);
    for finished in observed.finished.iter().filter(|f| f.group == g) {
        let tokens = finished.tokens as f64;
        // Cut by a cap below the present one: how long it would have become is open.
        if finished.capped && tokens < group.cap * 0.9 { seen.open(tokens) } else { seen.whole(tokens) }
    }
    group.flights.iter().for_each(|&tokens| seen.open(tokens));
    seen
}

/// Seconds in which a run went on; pauses between runs are not counted.
fn spent(paces: &[Pace]) -> f64 {
    paces.windows(2).filter(|w| w[0].run == w[1].run).map(|w| w[1].at - w[0].at).sum()
}

/// Work a second, and the standard error of its logarithm. `None` where no time is known.
fn rate(paces: &[Pace], prompt_cost: f64) -> (Option<f64>, f64) {
    let steps: Vec<(f64, f64)> = paces
        .windows(2)
        .filter(|w| w[0].run == w[1].run && w[1].at > w[0].at)
        .map(|w| {
            let work = (w[1].tokens - w[0].tokens) + prompt_cost * (w[1].prompt_tokens - w[0].prompt_tokens);
            (w[1].at - w[0].at, work)
        })
        .collect();
    let all: f64 = steps.iter().map(|s| s.0).sum();
    // The first minute fills the server; what lies more than six hours back tells little of now.
    let skip = (all * 0.1).min(60.0).max(all - 6.0 * 3600.0);
    let window = all - skip;
    let (mut at, mut pieces) = (0.0, [(0.0, 0.0); PIECES]);
    for (seconds, work) in steps {
        let piece = ((at + seconds / 2.0 - skip) / window * PIECES as f64).floor();
        if piece >= 0.0 {
            let piece = &mut pieces[(piece as usize).min(PIECES - 1)];
            *piece = (piece.0 + seconds, piece.1 + work);
        }
        at += seconds;
    }
    let (seconds, work) = pieces.iter().fold((0.0, 0.0), |(s, w), p| (s + p.0, w + p.1));
    if seconds <= 0.0 || work <= 0.0 {
        return (None, 0.0);
    }
    let mean = work / seconds;
    let rates: Vec<f64> = pieces.iter().filter(|p| p.0 > 0.0).map(|p| p.1 / p.0 / mean - 1.0).collect();
    let n = rates.len() as f64;
    if n < 3.0 {
        return (Some(mean), 0.2);
    }
    let variance = rates.iter().map(|r| r * r).sum::<f64>() / (n - 1.0);
    // Neighbouring pieces are alike where the rate wanders slowly; then they tell less than so many would.
    let alike =
        rates.windows(2).map(|w| w[0] * w[1]).sum::<f64>() / rates.iter().map(|r| r * r).sum::<f64>().max(1e-12);
    let alike = alike.clamp(0.0, 0.6);
    (Some(mean), (variance / n * (1.0 + alike) / (1.0 - alike)).sqrt().min(0.5))
}

/// Where no status tells the tokens of every moment: each answer's tokens, spread over its time.
fn paces_from_answers(observed: &Observed, groups: &[Group], speed: f64) -> Vec<Pace> {
    const STEPS: usize = 256;
    let now = observed.pace.last().map(|p| p.at);
    let mut spans: Vec<(f64, f64, f64, f64)> = observed
        .finished
        .iter()
        .filter(|f| f.asked > 0.0)
        .map(|f| (f.asked, f.asked + f.seconds.max(1e-3), f.tokens as f64, f.prompt_tokens as f64))
        .collect();
    let last = spans.iter().map(|s| s.1).fold(0.0, f64::max);
    let end = now.unwrap_or(last).max(last);
    if observed.finished.len() > 1 && !observed.flights.is_empty() && last > 0.0 {
        for flight in groups.iter().flat_map(|g| &g.flights) {
            let seconds = if speed > 0.0 { flight / speed } else { 0.0 };
            spans.push((end - seconds.max(1e-3), end, *flight, 0.0));
        }
    }
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    let Some(begin) = spans.first().map(|s| s.0) else { return vec![] };
    let width = (end - begin).max(1e-3) / STEPS as f64;
    let mut flow = vec![(0.0, 0.0, false); STEPS];
    for (from, to, tokens, prompt) in spans {
        let (first, until) = (((from - begin) / width) as usize, ((to - begin) / width) as usize);
        for step in flow.iter_mut().enumerate().take(until.min(STEPS - 1) + 1).skip(first.min(STEPS - 1)) {
            let (low, high) = (begin + step.0 as f64 * width, begin + (step.0 + 1) as f64 * width);
            let share = ((to.min(high) - from.max(low)) / (to - from)).max(0.0);
            step.1.0 += tokens * share;
            step.1.1 += prompt * share;
            step.1.2 = true;
        }
    }
    let (mut run, mut tokens, mut prompts) = (0.0, 0.0, 0.0);
    let mut paces = vec![Pace { run, at: begin, tokens, prompt_tokens: prompts, in_flight: 0 }];
    for (i, (made, prompt, busy)) in flow.into_iter().enumerate() {
        if !busy {
            // Nobody was asked anything: a pause between two runs.
            run += 1.0;
        }
        tokens += made;
        prompts += prompt;
        let at = begin + (i + 1) as f64 * width;
        paces.push(Pace { run, at, tokens, prompt_tokens: prompts, in_flight: observed.flights.len() });
    }
    paces
}
