//! Whether a plan's interval holds the truth: whole runs are simulated, planned in their first minutes, and played on.
//!
//! `cargo test --test forecast -- --nocapture` prints the figures.

use eaglet::capture::Job;
use eaglet::capture::order::Order;
use eaglet::capture::status::{Finished, GroupStatus, InFlight, Observed, Pace};
use eaglet::plan::Setting;
use eaglet::plan::forecast::Model;
use eaglet::plan::simulate::{Machine, Simulation, Work};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};
use rayon::prelude::*;
use std::sync::Arc;

/// Eight datasets of different, heavy-tailed lengths, the last three of the class "long" with a cap and a number of
/// requests of its own.
struct World {
    groups: Vec<(GroupStatus, LogNormal<f64>)>,
    limits: Vec<usize>,
    machine: Machine,
    all: usize,
}

impl World {
    fn new(rng: &mut ChaCha8Rng, all: usize, limits: [usize; 2]) -> Self {
        // As in the story: median 646, mean 1,416, deviation 1,640.
        const MEDIANS: [f64; 8] = [250.0, 350.0, 450.0, 600.0, 800.0, 1000.0, 1600.0, 2600.0];
        let groups = MEDIANS.iter().enumerate().map(|(i, median)| {
            let long = i >= 5;
            let group = GroupStatus {
                class: if long { "long" } else { "short" }.into(),
                dataset: format!("b{i}"),
                wanted: all / 8,
                max_tokens: if long { 16_384 } else { 10_240 },
                ..GroupStatus::default()
            };
            let median: f64 = median * rng.random_range(0.7..1.4);
            (group, LogNormal::new(median.ln(), rng.random_range(0.6..1.0)).unwrap())
        });
        let groups = groups.collect();
        let machine = Machine {
            room: 50,
            rate: 860.0,
            alpha: rng.random_range(0.3..0.9),
            prompt_cost: rng.random_range(0.03..0.3),
            noise: rng.random_range(0.02..0.1),
            noise_s: rng.random_range(60.0..900.0),
        };
        Self { groups, limits: limits.to_vec(), machine, all: all / 8 * 8 }
    }

    fn jobs(&self, rng: &mut ChaCha8Rng) -> Vec<Work> {
        let of = |(g, (group, lengths)): (usize, &(GroupStatus, LogNormal<f64>))| -> Vec<Work> {
            let class = usize::from(group.class == "long");
            let work = |_| Work {
                group: g,
                class,
                prompt_tokens: (200 + 300 * g) as f64 * 0.5,
                tokens: lengths.sample(rng).round().clamp(1.0, group.max_tokens as f64),
            };
            (0..group.wanted).map(work).collect()
        };
        self.groups.iter().enumerate().flat_map(of).collect()
    }
}

/// A line of jobs in the order a capture takes.
struct Line {
    jobs: Vec<Work>,
    order: Order,
}

impl Line {
    fn new(jobs: Vec<Work>) -> Self {
        let ids = Arc::new(Vec::new());
        let job = |(i, work): (usize, &Work)| Job {
            id: i.to_string(),
            rid: String::new(),
            prompt: String::new(),
            dataset: format!("b{}", work.group),
            class: work.class,
            prompt_ids: Arc::clone(&ids),
            max_tokens: if work.class == 1 { 16_384 } else { 10_240 },
            seed: 0,
        };
        Self { order: Order::new(jobs.iter().enumerate().map(job).collect()), jobs }
    }

    fn fill(&mut self, server: &mut Simulation<ChaCha8Rng>, slots: usize) {
        while let Some(job) = self.order.next(slots, |class| server.may(class)) {
            server.send(self.jobs[job.id.parse::<usize>().unwrap()]);
        }
    }
}

/// One plan against what came true.
struct Guess {
    truth_s: f64,
    low: f64,
    middle: f64,
    high: f64,
    tokens: (f64, f64, f64, f64),
    /// By answers a minute.
    plain: f64,
}

/// Plays a run and plans it at each of these shares done.
fn play(seed: u64, all: usize, limits: [usize; 2], shares: &[f64]) -> Vec<Guess> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let world = World::new(&mut rng, all, limits);
    let jobs = world.jobs(&mut rng);
    let tokens: f64 = jobs.iter().map(|j| j.tokens).sum();
    let mut line = Line::new(jobs);
    let mut server = Simulation::new(world.machine, world.limits.clone(), rng);
    let slots: usize = limits.iter().sum();
    let mut observed =
        Observed { groups: world.groups.iter().map(|g| g.0.clone()).collect(), streaming: true, ..Observed::default() };
    let mut plans = Vec::new();
    line.fill(&mut server, slots);
    while let Some(done) = server.step() {
        let tokens = done.work.tokens as usize;
        line.order.learn(done.work.class, &format!("b{}", done.work.group), tokens);
        observed.finish(Finished {
            group: done.work.group,
            prompt_tokens: done.work.prompt_tokens as usize,
            tokens,
            capped: tokens == observed.groups[done.work.group].max_tokens,
            reasoned: true,
            asked: done.asked + 1.0,
            seconds: done.at - done.asked,
            in_flight: server.in_flight(),
        });
        if observed.pace.last().is_none_or(|p| server.now - p.at >= 5.0) {
            observed.pace.push(Pace {
                run: 0.0,
                at: server.now,
                tokens: server.tokens,
                prompt_tokens: server.prompt_tokens,
                in_flight: server.in_flight(),
            });
        }
        line.fill(&mut server, slots);
        let share = observed.finished.len() as f64 / world.all as f64;
        if plans.len() < shares.len() && share >= shares[plans.len()] {
            observed.flights = server
                .flights()
                .iter()
                .map(|f| InFlight {
                    class: observed.groups[f.work.group].class.clone(),
                    dataset: observed.groups[f.work.group].dataset.clone(),
                    prompt_tokens: f.work.prompt_tokens as usize,
                    tokens: f.tokens as usize,
                    max_tokens: observed.groups[f.work.group].max_tokens,
                    seconds: server.now - f.asked,
                })
                .collect();
            let classes = [("short".to_string(), limits[0]), ("long".to_string(), limits[1])];
            let setting = Setting {
                limit: Some(slots as f64),
                running: Some(slots.min(world.machine.room) as f64),
                classes: classes.into_iter().collect(),
            };
            let model = Model::fit(&observed, &setting, 200);
            let outlook = model.outlook(&model.as_is());
            let done = observed.finished.len() as f64;
            plans.push((server.now, outlook, server.now * (world.all as f64 - done) / done));
        }
    }
    let guess = |(at, outlook, plain): (f64, eaglet::plan::forecast::Outlook, f64)| {
        let hours = outlook.hours.unwrap();
        Guess {
            truth_s: server.now - at,
            low: hours.low * 3600.0,
            middle: hours.middle * 3600.0,
            high: hours.high * 3600.0,
            tokens: (tokens, outlook.tokens.low, outlook.tokens.middle, outlook.tokens.high),
            plain,
        }
    };
    plans.into_iter().map(guess).collect()
}

#[test]
fn the_interval_holds_the_truth_as_often_as_it_says() {
    let shares = [0.01, 0.05, 0.2];
    let runs: usize = std::env::var("RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(400);
    let all: usize = std::env::var("ALL").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000);
    let guesses: Vec<Vec<Guess>> =
        (0..runs as u64).into_par_iter().map(|seed| play(seed, all, [150, 32], &shares)).collect();
    let mut held = Vec::new();
    for (i, share) in shares.iter().enumerate() {
        let of = |f: &dyn Fn(&Guess) -> f64| guesses.iter().map(|g| f(&g[i])).sum::<f64>() / runs as f64;
        let covered = of(&|g| f64::from((g.low..=g.high).contains(&g.truth_s)));
        let tokens = of(&|g| f64::from((g.tokens.1..=g.tokens.3).contains(&g.tokens.0)));
        let error = of(&|g| (g.middle / g.truth_s - 1.0).abs());
        let bias = of(&|g| g.middle / g.truth_s - 1.0);
        let token_bias = of(&|g| g.tokens.2 / g.tokens.0 - 1.0);
        let plain = of(&|g| (g.plain / g.truth_s - 1.0).abs());
        let below = of(&|g| f64::from(g.truth_s < g.low));
        let width = of(&|g| (g.high - g.low) / g.middle);
        println!(
            "{:4.0}% done: hours held {:.1}% (below {:.1}%), tokens held {:.1}% (bias {:+.1}%), width {:.1}%; error {:.1}% (bias {:+.1}%), \
             answers a minute {:.1}%",
            share * 100.0,
            covered * 100.0,
            below * 100.0,
            tokens * 100.0,
            token_bias * 100.0,
            width * 100.0,
            error * 100.0,
            bias * 100.0,
            plain * 100.0
        );
        held.push(covered);
    }
    assert!(held.iter().all(|covered| (0.85..=0.95).contains(covered)), "{held:?} of {runs}");
}
