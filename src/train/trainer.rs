//! The training loop.

use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::Device;
use indicatif::ProgressBar;
use serde_json::json;

use super::checkpoint::{CheckpointError, Checkpoints, Saved, State};
use super::metrics::{HeldOutFigures, Metrics};
use super::optimizer::{AdamW, clip};
use super::pack::Plan;
use super::schedule::learning_rate;
use crate::draft::acceptance::ChainCounts;
use crate::draft::head::DraftHead;
use crate::draft::ttt::{Document, Layout, Objective, Teacher, step};
use crate::draft::vocab::DraftVocab;
use crate::progress;
use crate::recipe::Recipe;
use crate::sequences::TrainSequence;
use crate::signals::Signals;
use crate::target::rope::RopeTable;

/// Why training stopped.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("cannot write {path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error("no training sequence has a supervised token; look at data.train and data.supervise")]
    Nothing,
    #[error(
        "the {what} is not finite at step {step}; documents in the batch: {documents}; last good checkpoint: {last}\n\
         lower train.lr, or look at those documents' hidden states"
    )]
    NotFinite { what: &'static str, step: usize, documents: String, last: String },
    #[error("the states of {id} cannot be had: {reason}")]
    States { id: String, reason: String },
    #[error("{path} already holds a run; go on with --resume, or begin anew with --fresh (which removes it)")]
    Occupied { path: PathBuf },
}

/// Gives a sequence its states; the error is shown as the reason.
pub type Load<'a> = &'a dyn Fn(&TrainSequence) -> Result<Document, String>;

/// Held-out documents with the target's own greedy token at each of their targets.
pub struct HeldOut {
    documents: Vec<Document>,
    /// By document and token: the target's likeliest token of its whole vocabulary.
    greedy: Vec<Vec<u32>>,
}

impl HeldOut {
    /// `greedy(states)` gives the target's likeliest token after each row of last states, `[n, target_hidden]`.
    pub fn new(documents: Vec<Document>, greedy: impl Fn(&[f32]) -> Vec<u32>) -> Self {
        let greedy = documents.iter().map(|document| greedy(&document.last)).collect();
        Self { documents, greedy }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.documents.is_empty()
    }

    /// Loss, accuracies and the acceptance length they imply.
    pub fn evaluate(
        &self,
        head: &DraftHead,
        vocab: &DraftVocab,
        teacher: &Teacher,
        rope: &RopeTable,
        objective: Objective,
    ) -> HeldOutFigures {
        let mut chain = ChainCounts::new(objective.steps);
        let mut sums = vec![0.0; objective.steps];
        for (document, greedy) in self.documents.iter().zip(&self.greedy) {
            let views = [(&document.ids[..], &document.loss_mask[..])];
            let counts = Layout::new(&views, objective.steps).counts();
            let output = step(head, teacher, rope, std::slice::from_ref(document), objective, &counts, &[]);
            for (k, figures) in output.steps.iter().enumerate() {
                // Undo the step's weight, so that documents add up by rows.
                let weight = objective.decay.powi(k as i32) / (counts[k] as f64 + 1e-5);
                sums[k] += figures.loss / weight;
            }
            chain.add(&output.layout, |k, i| {
                let drafted = vocab.to_target(output.steps[k].draft_top[i]);
                let (_, token) = output.layout.targets[output.layout.counted[k].targets[i]];
                drafted == greedy[token]
            });
        }
        let step_loss: Vec<f64> = sums.iter().zip(&chain.rows).map(|(sum, &rows)| sum / (rows as f64 + 1e-5)).collect();
        let loss = step_loss.iter().enumerate().map(|(k, l)| objective.decay.powi(k as i32) * l).sum();
        HeldOutFigures::new(loss, step_loss, &chain)
    }
}

/// How a run ended.
#[derive(Debug)]
pub enum Outcome {
    Finished(Box<Finished>),
    /// A signal came; the run is saved in the checkpoint.
    Interrupted {
        signal: i32,
        checkpoint: PathBuf,
    },
}

/// A finished run.
#[derive(Debug)]
pub struct Finished {
    /// The head that did best on the held-out sequences; the last one where there are none.
    pub head: DraftHead,
    pub steps: usize,
    pub tokens: usize,
    /// Of the last optimizer steps, averaged.
    pub loss: f64,
    pub held_out: Option<HeldOutFigures>,
    pub tokens_per_second: f64,
}

/// Everything a run needs; [`Trainer::run`] is the loop.
pub struct Trainer<'a> {
    pub recipe: &'a Recipe,
    pub device: Device,
    pub teacher: Teacher,
    pub vocab: &'a DraftVocab,
    pub sequences: &'a [TrainSequence],
    /// Gives a sequence its states.
    pub load: Load<'a>,
    pub held_out: HeldOut,
    /// A hash of the training sequences and the draft vocabulary.
    pub data: String,
    /// Looked at between steps.
    pub signals: &'a Signals,
}

impl Trainer<'_> {
    /// Trains `head` from the start, or from `run/checkpoints` when `resume` is set and one is there.
    ///
    /// # Errors
    /// On a non-finite loss or gradient, unreadable states, a checkpoint that does not fit, or a full disk.
    pub fn run(&self, mut head: DraftHead, resume: bool) -> Result<Outcome, TrainError> {
        let recipe = &self.recipe.train;
        let io = |source| TrainError::Io { path: recipe.out.clone(), source };
        std::fs::create_dir_all(&recipe.out).map_err(io)?;
        let checkpoints = Checkpoints::new(&recipe.out);
        let mut optimizer = AdamW::default();
        let mut state = State { step: 0, tokens: 0, best: None, data: self.data.clone(), recipe: self.recipe.clone() };
        match checkpoints.newest() {
            Some(path) if resume => {
                let saved = Checkpoints::load(&path, &head.config, &self.device)?;
                saved.accepts(self.recipe, &self.data)?;
                let Saved { head: saved_head, optimizer: saved_optimizer, state: saved_state, .. } = saved;
                tracing::info!("resuming from {}", path.display());
                (head, optimizer) = (saved_head, saved_optimizer);
                state = State { recipe: self.recipe.clone(), ..saved_state };
            }
            Some(_) => return Err(TrainError::Occupied { path: recipe.out.clone() }),
            None if resume => tracing::info!("no checkpoint under {} yet: starting anew", recipe.out.display()),
            None => {}
        }

        let lengths: Vec<usize> = self.sequences.iter().map(|s| s.ids.len()).collect();
        let plan = Plan::new(&lengths, recipe);
        let total = plan.steps.len();
        if total == 0 {
            return Err(TrainError::Nothing);
        }
        let objective = Objective { loss: recipe.loss, steps: recipe.ttt_steps, decay: recipe.step_decay };
        let longest = lengths.iter().max().copied().unwrap_or(0) + recipe.ttt_steps + 1;
        let rope = RopeTable::new(&head.config.rope, head.config.head_dim, longest, &self.device);
        let trained: Vec<String> = head
            .weights()
            .keys()
            .filter(|name| self.recipe.draft.train_head || name.as_str() != "lm_head.weight")
            .cloned()
            .collect();

        let mut metrics = Metrics::open(&recipe.out, state.step).map_err(io)?;
        let bar = self.progress(total, state.step);
        let (begun, mut fed) = (Instant::now(), 0usize);
        let mut recent = Vec::new();
        let mut held_out = None;

        while state.step < total {
            let packs = &plan.steps[state.step];
            let name_documents = || {
                let ids: Vec<_> = packs.iter().flatten().map(|&d| self.sequences[d].id.as_str()).collect();
                ids.join(", ")
            };
            let not_finite = |what| TrainError::NotFinite {
                what,
                step: state.step,
                documents: name_documents(),
                last: checkpoints.newest().map_or("none yet".into(), |path| path.display().to_string()),
            };
            let mut counts = vec![0; objective.steps];
            for pack in packs {
                let views: Vec<_> =
                    pack.iter().map(|&d| (&self.sequences[d].ids[..], &self.sequences[d].loss_mask[..])).collect();
                let pack_counts = Layout::new(&views, objective.steps).counts();
                counts.iter_mut().zip(pack_counts).for_each(|(sum, n)| *sum += n);
            }

            let mut gradients = std::collections::BTreeMap::new();
            let (mut loss, mut tokens) = (0.0, 0);
            let mut step_loss = vec![0.0; objective.steps];
            let mut hits = vec![0usize; objective.steps];
            for pack in packs {
                let documents = pack.iter().map(|&d| {
                    let sequence = &self.sequences[d];
                    tokens += sequence.ids.len();
                    (self.load)(sequence).map_err(|reason| TrainError::States { id: sequence.id.clone(), reason })
                });
                let documents = documents.collect::<Result<Vec<_>, _>>()?;
                let output = step(&head, &self.teacher, &rope, &documents, objective, &counts, &trained);
                loss += output.loss;
                for (k, figures) in output.steps.iter().enumerate() {
                    step_loss[k] += figures.loss / objective.decay.powi(k as i32);
                    hits[k] += figures.draft_top.iter().zip(&figures.target_top).filter(|(d, t)| d == t).count();
                }
                for (name, gradient) in output.gradients {
                    let sum = match gradients.remove(&name) {
                        Some(sum) => sum + gradient,
                        None => gradient,
                    };
                    gradients.insert(name, sum);
                }
            }
            if !loss.is_finite() {
                return Err(not_finite("loss"));
            }
            let norm = clip(&mut gradients, recipe.clip);
            if !norm.is_finite() {
                return Err(not_finite("gradient"));
            }
            let lr = learning_rate(recipe, state.step, total);
            optimizer.update(&mut head, gradients, lr, recipe);
            state.step += 1;
            state.tokens += tokens;
            fed += tokens;

            let share = |k: usize| hits[k] as f64 / counts[k].max(1) as f64;
            let speed = fed as f64 / begun.elapsed().as_secs_f64();
            recent.push(loss);
            metrics
                .write(&json!({
                    "step": state.step, "lr": lr, "loss": loss, "step_loss": step_loss, "gradient_norm": norm,
                    "accuracy_in_vocabulary": (0..objective.steps).map(share).collect::<Vec<_>>(),
                    "tokens": state.tokens, "tokens_per_second": speed,
                }))
                .map_err(io)?;
            let text = format!("loss {loss:.3}  accuracy {:.3}  {speed:.0} tok/s", share(0));
            bar.set_message(text.clone());
            bar.inc(1);
            if bar.is_hidden() && (state.step.is_multiple_of(20) || state.step == total) {
                let left = begun.elapsed().mul_f64((total - state.step) as f64 / recent.len() as f64);
                tracing::info!("step {}/{total}  {text}  {} left", state.step, indicatif::HumanDuration(left));
            }

            let every = |interval: usize| interval > 0 && state.step.is_multiple_of(interval);
            let last = state.step == total;
            if !self.held_out.is_empty() && (last || every(recipe.evaluate_every)) {
                let figures = self.held_out.evaluate(&head, self.vocab, &self.teacher, &rope, objective);
                metrics.write(&json!({"step": state.step, "held_out": figures})).map_err(io)?;
                let line = format!(
                    "step {}: held-out loss {:.3}, accuracy {:.3}, acceptance length {:.3}",
                    state.step, figures.loss, figures.accuracy[0], figures.acceptance_length
                );
                if bar.is_hidden() {
                    tracing::info!("{line}")
                } else {
                    bar.println(line)
                }
                if state.best.is_none_or(|(best, _)| figures.acceptance_length > best) {
                    state.best = Some((figures.acceptance_length, state.step));
                    // The best is kept on disk, so that the run can end with it.
                    checkpoints.save(&head, &optimizer, &state, recipe.keep)?;
                }
                held_out = Some(figures);
            }
            if last || every(recipe.checkpoint_every) {
                checkpoints.save(&head, &optimizer, &state, recipe.keep)?;
            }
            if let (Some(signal), false) = (self.signals.received(), last) {
                let checkpoint = checkpoints.save(&head, &optimizer, &state, recipe.keep)?;
                bar.abandon();
                return Ok(Outcome::Interrupted { signal, checkpoint });
            }
        }
        bar.finish_and_clear();

        if let Some((_, step)) = state.best.filter(|&(_, step)| step != state.step) {
            let saved = Checkpoints::load(&checkpoints.at(step), &head.config, &self.device)?;
            head = saved.head;
            held_out = None;
        }
        if held_out.is_none() && !self.held_out.is_empty() {
            held_out = Some(self.held_out.evaluate(&head, self.vocab, &self.teacher, &rope, objective));
        }
        let tail = &recent[recent.len().saturating_sub(20)..];
        Ok(Outcome::Finished(Box::new(Finished {
            head,
            steps: total,
            tokens: state.tokens,
            loss: tail.iter().sum::<f64>() / tail.len().max(1) as f64,
            held_out,
            tokens_per_second: fed as f64 / begun.elapsed().as_secs_f64(),
        })))
    }

    fn progress(&self, total: usize, done: usize) -> ProgressBar {
        let bar = progress::bar(total as u64, "train {wide_bar} step {pos}/{len}  {msg}  {eta} left");
        bar.set_position(done as u64);
        bar.reset_eta();
        bar
    }
}
