//! Which answers are asked for, and under which cap: classes, samples, duplicates, room.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::prompts::Prompt;
use super::render::PromptIds;
use super::{Draw, Job};
use crate::recipe::{CaptureRecipe, ClassRecipe, Concurrency};

/// A class with everything settled: what it leaves out comes from `[capture]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Class {
    /// Empty for prompts outside every class of the recipe.
    pub name: String,
    pub max_tokens: usize,
    pub samples: usize,
    /// Prompts of each dataset; 0 takes all.
    pub take: usize,
    /// Requests in flight; `None` has no bound of its own.
    pub concurrency: Option<usize>,
    pub draw: Draw,
    datasets: Vec<glob::Pattern>,
    prompt_tokens: (usize, usize),
}

impl Class {
    /// Whether a dataset's prompts belong here, if their length does.
    pub fn takes(&self, dataset: &str) -> bool {
        self.datasets.is_empty() || self.datasets.iter().any(|d| d.matches(dataset))
    }

    /// Whether all of a dataset's prompts belong here, however long.
    pub fn takes_all(&self, dataset: &str) -> bool {
        self.takes(dataset) && self.prompt_tokens == (0, usize::MAX)
    }

    /// About how many answers come of so many prompts: held-out ones are sampled once.
    pub fn answers(&self, prompts: usize, held_out_share: f64) -> usize {
        let again = (self.samples.max(1) - 1) as f64 * (1.0 - held_out_share);
        (prompts as f64 * (1.0 + again)).round() as usize
    }
}

/// The recipe's classes, and behind them the one for all other prompts.
#[derive(Debug, Clone, PartialEq)]
pub struct Classes(pub Vec<Class>);

impl Classes {
    /// Settles a recipe's classes.
    pub fn new(recipe: &CaptureRecipe) -> Self {
        let rest = ClassRecipe::default();
        let all = recipe.class.iter().chain([&rest]).enumerate().map(|(i, class)| Class {
            name: match class.name.as_str() {
                "" if i < recipe.class.len() => format!("class {}", i + 1),
                name => name.to_string(),
            },
            max_tokens: class.max_tokens.unwrap_or(recipe.max_tokens),
            samples: class.samples.unwrap_or(recipe.samples),
            take: class.take.unwrap_or(recipe.take),
            concurrency: match class.concurrency {
                Some(Concurrency::Fixed(n)) => Some(n),
                _ => None,
            },
            draw: Draw {
                temperature: class.temperature.unwrap_or(recipe.temperature),
                top_p: class.top_p.unwrap_or(recipe.top_p),
                top_k: class.top_k.unwrap_or(recipe.top_k),
                stop_token_ids: recipe.stop_token_ids.clone(),
            },
            datasets: class.datasets.iter().filter_map(|d| glob::Pattern::new(d).ok()).collect(),
            prompt_tokens: (class.min_prompt_tokens.unwrap_or(0), class.max_prompt_tokens.unwrap_or(usize::MAX)),
        });
        Self(all.collect())
    }

    /// The first class a prompt fits.
    pub fn of(&self, dataset: &str, prompt_tokens: usize) -> usize {
        let fits = |class: &Class| {
            class.takes(dataset) && (class.prompt_tokens.0..=class.prompt_tokens.1).contains(&prompt_tokens)
        };
        self.0.iter().position(fits).unwrap_or(self.0.len() - 1)
    }
}

/// A prompt that is not asked, with the reason.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    pub id: String,
    pub dataset: String,
    pub reason: String,
}

/// What is to be asked.
#[derive(Debug, Default)]
pub struct Jobs {
    pub jobs: Vec<Job>,
    /// Answers wanted of each (class, dataset), those from before too.
    pub wanted: BTreeMap<(usize, String), usize>,
    pub skipped: Vec<Skipped>,
    /// Prompts left off because another has the same ids.
    pub duplicates: usize,
    /// Prompts beyond a class's `take`.
    pub left_off: usize,
}

/// What bounds a prompt.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Most tokens of prompt and answer together.
    pub room: usize,
    /// Ids at or above it kill an SGLang server. 0 is unknown.
    pub vocab_size: usize,
}

/// A prompt with its ids.
type Asked<'a> = (&'a Prompt, &'a Arc<Vec<u32>>);

/// Plans every answer. `take` keeps the prompts of a dataset that are answered, then those whose ids hash lowest, so that
/// a larger number keeps the smaller one's prompts. Held-out prompts are sampled once.
pub fn plan(
    prompts: &[Prompt],
    ids: &[PromptIds],
    classes: &Classes,
    recipe: &CaptureRecipe,
    bounds: Bounds,
    done: &HashSet<String>,
) -> Jobs {
    let mut jobs = Jobs::default();
    let mut seen: HashSet<[u8; 16]> = HashSet::new();
    let mut groups: BTreeMap<(usize, String), Vec<Asked>> = BTreeMap::new();
    for (prompt, ids) in prompts.iter().zip(ids) {
        let mut skip = |reason: String| {
            jobs.skipped.push(Skipped { id: prompt.id.clone(), dataset: prompt.dataset.clone(), reason });
        };
        let ids = match ids {
            Ok(ids) if ids.is_empty() => {
                skip("no tokens".into());
                continue;
            }
            Ok(ids) => ids,
            Err(reason) => {
                skip(format!("not rendered: {reason}"));
                continue;
            }
        };
        if let Some(id) = ids.iter().find(|&&id| bounds.vocab_size > 0 && id as usize >= bounds.vocab_size) {
            skip(format!("id {id} is outside the vocabulary of {}", bounds.vocab_size));
            continue;
        }
        if ids.len() + 1 > bounds.room {
            skip(format!("its {} tokens leave no room in the context of {}", ids.len(), bounds.room));
            continue;
        }
        let mut hash = Sha256::new();
        ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
        let hash = hash.finalize();
        if !seen.insert(std::array::from_fn(|i| hash[i])) {
            jobs.duplicates += 1;
            continue;
        }
        groups.entry((classes.of(&prompt.dataset, ids.len()), prompt.dataset.clone())).or_default().push((prompt, ids));
    }
    for ((class, dataset), mut members) in groups {
        let settled = &classes.0[class];
        // At random, so that what is there when a run stops early stands for all; those that are answered stay taken.
        members.sort_by_cached_key(|(prompt, _)| (!done.contains(&prompt.id), prompt.rank()));
        if settled.take > 0 && members.len() > settled.take {
            jobs.left_off += members.len() - settled.take;
            members.truncate(settled.take);
        }
        let mut wanted = 0;
        for sample in 0..settled.samples.max(1) {
            for (prompt, ids) in &members {
                if sample > 0 && prompt.is_held_out(recipe.held_out_share) {
                    continue;
                }
                let id = if sample == 0 { prompt.id.clone() } else { format!("{}#{sample}", prompt.id) };
                wanted += 1;
                if !done.contains(&id) {
                    jobs.jobs.push(Job {
                        rid: String::new(),
                        prompt: prompt.id.clone(),
                        dataset: dataset.clone(),
                        class,
                        prompt_ids: Arc::clone(ids),
                        max_tokens: settled.max_tokens.min(bounds.room - ids.len()),
                        seed: seed(recipe.seed, &id),
                        id,
                    });
                }
            }
        }
        jobs.wanted.insert((class, dataset), wanted);
    }
    jobs
}

/// A seed of a sequence's own, for engines that heed one; 31 bits, which every engine takes.
pub fn seed(seed: u64, id: &str) -> u64 {
    let hash = Sha256::digest(format!("{seed} {id}").as_bytes());
    u64::from(u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]]) >> 1)
}

/// How many answers each dataset wants.
pub fn by_dataset(wanted: &BTreeMap<(usize, String), usize>) -> HashMap<String, usize> {
    let mut all = HashMap::new();
    for ((_, dataset), count) in wanted {
        *all.entry(dataset.clone()).or_default() += count;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::prompts::Content;

    fn recipe() -> CaptureRecipe {
        let short = ClassRecipe {
            name: "short".into(),
            datasets: vec!["b[12]_*".into()],
            max_prompt_tokens: Some(10),
            max_tokens: Some(50),
            take: Some(3),
            concurrency: Some(Concurrency::Fixed(4)),
            ..ClassRecipe::default()
        };
        CaptureRecipe { class: vec![short], max_tokens: 100, samples: 2, ..CaptureRecipe::default() }
    }

    fn planned(lengths: &[(&str, usize)], recipe: &CaptureRecipe, done: &[&str]) -> Jobs {
        let prompts: Vec<Prompt> = lengths
            .iter()
            .enumerate()
            .map(|(i, (dataset, _))| Prompt {
                id: format!("p{i}"),
                dataset: dataset.to_string(),
                content: Content::Ids(vec![]),
            })
            .collect();
        let ids: Vec<PromptIds> =
            lengths.iter().enumerate().map(|(i, (_, n))| Ok(Arc::new(vec![i as u32; *n]))).collect();
        let done = done.iter().map(|id| id.to_string()).collect();
        plan(&prompts, &ids, &Classes::new(recipe), recipe, Bounds { room: 120, vocab_size: 1000 }, &done)
    }

    #[test]
    fn classes_set_the_cap_and_the_number() {
        let all = [("b1_x", 5), ("b1_x", 11), ("b2_y", 5), ("b3_z", 5), ("b1_x", 6), ("b1_x", 7), ("b1_x", 8)];
        let jobs = planned(&all, &recipe(), &[]);
        let of = |class| jobs.jobs.iter().filter(|j| j.class == class).map(|j| j.max_tokens).collect::<Vec<_>>();
        assert!(of(0).iter().all(|&cap| cap == 50) && of(1).iter().all(|&cap| cap == 100));
        assert_eq!(jobs.left_off, 1);
        // A larger `take` keeps the smaller one's prompts.
        let mut more = recipe();
        more.class[0].take = Some(4);
        let ids = |jobs: &Jobs| jobs.jobs.iter().map(|j| j.id.clone()).collect::<HashSet<_>>();
        assert!(ids(&planned(&all, &more, &[])).is_superset(&ids(&jobs)));
    }

    #[test]
    fn what_cannot_be_asked_is_listed() {
        let recipe = CaptureRecipe { held_out_share: 0.0, samples: 2, ..CaptureRecipe::default() };
        let jobs = planned(&[("a", 5), ("a", 120), ("a", 119), ("a", 0)], &recipe, &["p0"]);
        assert_eq!(jobs.skipped.len(), 2);
        assert!(jobs.skipped[0].reason.contains("leave no room"), "{:?}", jobs.skipped);
        // p0 is done, its second sample is not; p2 has room for one token.
        let mut left: Vec<(&str, usize)> = jobs.jobs.iter().map(|j| (j.id.as_str(), j.max_tokens)).collect();
        left.sort_unstable();
        assert_eq!(left, [("p0#1", 115), ("p2", 1), ("p2#1", 1)]);
        assert_eq!(jobs.wanted[&(0, "a".to_string())], 4);
    }

    #[test]
    fn equal_prompts_are_asked_once_and_wild_ids_never() {
        let prompts =
            ["x", "y", "z"].map(|id| Prompt { id: id.into(), dataset: "d".into(), content: Content::Ids(vec![]) });
        let ids: Vec<PromptIds> = vec![Ok(Arc::new(vec![1, 2])), Ok(Arc::new(vec![1, 2])), Ok(Arc::new(vec![1000]))];
        let recipe = CaptureRecipe::default();
        let bounds = Bounds { room: 120, vocab_size: 1000 };
        let jobs = plan(&prompts, &ids, &Classes::new(&recipe), &recipe, bounds, &HashSet::new());
        assert_eq!((jobs.jobs.len(), jobs.duplicates), (1, 1));
        assert!(jobs.skipped[0].reason.contains("outside the vocabulary"));
    }
}
