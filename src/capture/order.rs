//! Which answer is asked for next.
//!
//! Datasets go in step, each at its share, so that a run that is stopped early holds all of them and a forecast sees all
//! of them. Near the end the longest come first: then the last ones to finish are short, and the server is not left with
//! one long answer and an empty cache (longest processing time first, Graham 1969).

use std::collections::{HashMap, VecDeque};

use super::Job;

/// Jobs that wait, by class and dataset.
#[derive(Debug, Default)]
pub struct Order {
    groups: Vec<Group>,
    of: HashMap<(usize, String), usize>,
    waiting: usize,
}

#[derive(Debug)]
struct Group {
    class: usize,
    jobs: VecDeque<Job>,
    /// All that ever stood here.
    all: usize,
    /// Answer tokens of those that are through, and their number.
    tokens: f64,
    answers: f64,
    cap: usize,
}

impl Group {
    /// Answer tokens expected: the mean so far, held up by the cap while there are few.
    fn expected(&self) -> f64 {
        (self.tokens + self.cap as f64) / (self.answers + 1.0)
    }
}

/// The end begins when this many times the requests in flight are left.
const END: usize = 8;

impl Order {
    /// Sets jobs in line.
    pub fn new(jobs: Vec<Job>) -> Self {
        let mut order = Self::default();
        jobs.into_iter().for_each(|job| order.push(job));
        order
    }

    /// Adds one at the end of its group's line.
    pub fn push(&mut self, job: Job) {
        let key = (job.class, job.dataset.clone());
        let at = *self.of.entry(key).or_insert_with(|| {
            let (class, cap) = (job.class, job.max_tokens);
            self.groups.push(Group { class, jobs: VecDeque::new(), all: 0, tokens: 0.0, answers: 0.0, cap });
            self.groups.len() - 1
        });
        let group = &mut self.groups[at];
        group.jobs.push_back(job);
        group.all += 1;
        self.waiting += 1;
    }

    /// Puts back one that failed: it is the next of its group.
    pub fn push_front(&mut self, job: Job) {
        let at = self.of.get(&(job.class, job.dataset.clone())).copied();
        match at {
            Some(at) => {
                self.groups[at].jobs.push_front(job);
                self.waiting += 1;
            }
            None => self.push(job),
        }
    }

    /// Learns an answer's length.
    pub fn learn(&mut self, class: usize, dataset: &str, tokens: usize) {
        if let Some(&at) = self.of.get(&(class, dataset.to_string())) {
            self.groups[at].tokens += tokens as f64;
            self.groups[at].answers += 1.0;
        }
    }

    /// Keeps only so many, each group at its share and none left without.
    pub fn keep(&mut self, most: usize) {
        let all = self.waiting.max(1);
        for group in &mut self.groups {
            let share = (group.jobs.len() * most).div_ceil(all).max(1).min(group.jobs.len());
            // Evenly through the line, which may be sorted by something that bears on length.
            let step = group.jobs.len() as f64 / share.max(1) as f64;
            let kept: Vec<usize> = (0..share).map(|i| (i as f64 * step) as usize).collect();
            let mut at = 0;
            group.jobs.retain(|_| {
                at += 1;
                kept.binary_search(&(at - 1)).is_ok()
            });
            group.all = group.jobs.len();
        }
        self.waiting = self.groups.iter().map(|g| g.jobs.len()).sum();
    }

    /// Prompt tokens in line, and of how many jobs.
    pub fn prompt_tokens(&self) -> (usize, usize) {
        let jobs = self.groups.iter().flat_map(|g| &g.jobs);
        jobs.fold((0, 0), |(tokens, count), job| (tokens + job.prompt_ids.len(), count + 1))
    }

    /// Jobs in line.
    pub fn len(&self) -> usize {
        self.waiting
    }

    /// Whether none is in line.
    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// The next job of a class that may send, with so many slots in use.
    pub fn next(&mut self, slots: usize, may: impl Fn(usize) -> bool) -> Option<Job> {
        let end = self.waiting <= END * slots.max(1);
        let left = |g: &Group| g.jobs.len() as f64 / g.all.max(1) as f64;
        let rank = |g: &Group| if end { (g.expected(), left(g)) } else { (left(g), g.expected()) };
        let open = self.groups.iter_mut().filter(|g| !g.jobs.is_empty() && may(g.class));
        let group = open.max_by(|a, b| {
            let (a, b) = (rank(a), rank(b));
            a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
        })?;
        self.waiting -= 1;
        group.jobs.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn job(dataset: &str, i: usize) -> Job {
        Job {
            id: format!("{dataset}{i}"),
            rid: String::new(),
            prompt: String::new(),
            dataset: dataset.into(),
            class: usize::from(dataset == "slow"),
            prompt_ids: Arc::new(vec![]),
            max_tokens: 100,
            seed: 0,
        }
    }

    fn order() -> Order {
        let jobs = (0..300).map(|i| job("long", i)).chain((0..100).map(|i| job("slow", i)));
        let mut order = Order::new(jobs.collect());
        order.learn(0, "long", 90);
        order.learn(1, "slow", 10);
        order
    }

    #[test]
    fn datasets_go_in_step_and_the_longest_end_first() {
        let mut order = order();
        let first: Vec<Job> = (0..200).map(|_| order.next(5, |_| true).unwrap()).collect();
        assert_eq!(first.iter().filter(|j| j.dataset == "long").count(), 150);
        let rest: Vec<Job> = std::iter::from_fn(|| order.next(5, |_| true)).collect();
        assert_eq!(rest.len(), 200);
        assert!(rest[198..].iter().all(|j| j.dataset == "slow"), "short ones end the run");
        assert!(order.is_empty());
    }

    #[test]
    fn a_class_that_is_full_is_passed_over() {
        let mut order = order();
        assert!((0..300).all(|_| order.next(5, |class| class == 0).is_some()));
        assert!(order.next(5, |class| class == 0).is_none());
        assert_eq!(order.len(), 100);
        let back = order.next(5, |_| true).unwrap();
        let id = back.id.clone();
        order.push_front(back);
        assert_eq!(order.next(5, |_| true).unwrap().id, id);
    }

    #[test]
    fn a_pilot_has_every_dataset() {
        let mut order = order();
        order.push(job("rare", 0));
        order.keep(40);
        let kept: Vec<Job> = std::iter::from_fn(|| order.next(5, |_| true)).collect();
        let of = |d: &str| kept.iter().filter(|j| j.dataset == d).count();
        assert_eq!((of("long"), of("slow"), of("rare")), (30, 10, 1));
    }

    #[test]
    fn the_end_of_a_run_costs_little() {
        // The story: 88,000 answers of eight datasets, mean 1,416, median about 650, capped at 10,240, 50 at a time.
        use rand::{Rng, SeedableRng};
        const SLOTS: usize = 50;
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(5);
        let names: Vec<String> = (0..8).map(|d| format!("b{d}")).collect();
        let mut order = Order::new((0..88_000).map(|i| Job { max_tokens: 10_240, ..job(&names[i % 8], i) }).collect());
        // Seconds are tokens: all that run are equally fast. The heap holds when each ends, and of which dataset.
        let mut running = std::collections::BinaryHeap::new();
        let (mut now, mut full, mut tokens) = (0u64, 0u64, 0u64);
        loop {
            while running.len() < SLOTS {
                let Some(job) = order.next(SLOTS, |_| true) else { break };
                let dataset = names.iter().position(|n| *n == job.dataset).unwrap();
                // Log-normal, the datasets' medians a factor of two about the whole's.
                let normal: f64 = (0..12).map(|_| rng.random_range(0.0..1.0)).sum::<f64>() - 6.0;
                let median = 650.0 * 2f64.powf(dataset as f64 / 3.5 - 1.0);
                let length = (median * (1.15 * normal).exp()).clamp(1.0, 10_240.0) as u64;
                tokens += length;
                running.push((std::cmp::Reverse(now + length), dataset, length));
            }
            if running.len() == SLOTS {
                full = now;
            }
            let Some((std::cmp::Reverse(at), dataset, length)) = running.pop() else { break };
            now = at;
            order.learn(0, &names[dataset], length as usize);
        }
        let tail = (now - full) as f64 / now as f64;
        println!("mean {}, the end takes {:.2}% of the run", tokens / 88_000, tail * 100.0);
        assert!((1200..1700).contains(&(tokens / 88_000)) && tail < 0.05);
    }
}
