//! The road that the commands share: which target, which layers, which sequences, whose states.

use std::path::Path;

use burn::tensor::{Device, Tensor, TensorData};
use eaglet::draft::config::DraftConfig;
use eaglet::draft::head::DraftHead;
use eaglet::draft::ttt::{Document, Objective, Teacher};
use eaglet::draft::vocab::DraftVocab;
use eaglet::evaluate::decode::Speculator;
use eaglet::evaluate::report::{DecodeReport, Prompt, decode};
use eaglet::features::extract::{Extracted, extract};
use eaglet::features::store::FeatureStore;
use eaglet::progress;
use eaglet::recipe::Recipe;
use eaglet::sequences::{ReadOptions, TrainSequence, read};
use eaglet::signals::Signals;
use eaglet::target::family::Family;
use eaglet::target::generate::{Request, argmax, host_rows};
use eaglet::target::{TargetFiles, TargetModel, WeightSource, fetch};
use eaglet::train::HeldOut;
use eaglet::train::init::LentLayer;
use miette::{IntoDiagnostic, Result, miette};
use sha2::{Digest, Sha256};

use super::device;

/// A recipe with its target opened.
pub struct Road {
    pub recipe: Recipe,
    pub device: Device,
    pub files: TargetFiles,
    pub family: Option<Family>,
    pub store: FeatureStore,
}

/// Sequences of a recipe.
pub struct Data {
    pub train: Vec<TrainSequence>,
    pub held_out: Vec<TrainSequence>,
}

impl Road {
    /// Fetches the target where it is missing and settles the fused layers.
    pub fn open(recipe: Recipe) -> Result<Self> {
        let device = device(&recipe.target.device)?;
        let files = fetch::ensure(&recipe.target).into_diagnostic()?;
        let family = recipe.target.family.as_deref().map(Family::named).transpose().into_diagnostic()?;
        if let Some(family) = &family {
            family.check(&files.config).into_diagnostic()?;
        }
        let layers = match (&recipe.features.layers[..], &family) {
            ([], Some(family)) => family.fused_layers.clone(),
            ([], None) => files.config.default_layers(),
            (given, _) => given.to_vec(),
        };
        let fingerprint = files.fingerprint().into_diagnostic()?;
        let store = FeatureStore::new(&recipe.features.cache, &recipe.features, &files.config, &fingerprint, layers)
            .into_diagnostic()?;
        Ok(Self { recipe, device, files, family, store })
    }

    /// Puts the target's weights on the device.
    pub fn model(&self) -> Result<TargetModel> {
        TargetModel::load(&self.files.config, &self.files, &self.device).into_diagnostic()
    }

    /// Reads training and held-out sequences and prints what was left out.
    pub fn data(&self) -> Result<Data> {
        let train = self.read("training", &self.recipe.data.train, self.recipe.data.max_tokens)?;
        let held_out = self.read("held-out", &self.recipe.data.held_out, self.recipe.data.max_held_out_tokens)?;
        let held: std::collections::HashSet<&str> = held_out.iter().map(|s| s.id.as_str()).collect();
        if let Some(both) = train.iter().find(|s| held.contains(s.id.as_str())) {
            return Err(miette!("sequence {} is both trained on and held out", both.id));
        }
        Ok(Data { train, held_out })
    }

    fn read(&self, what: &str, paths: &[std::path::PathBuf], max_tokens: usize) -> Result<Vec<TrainSequence>> {
        let options = ReadOptions { max_tokens, ..ReadOptions::new(&self.recipe.data, self.files.config.vocab_size) };
        let (sequences, report) = read(paths, &options).into_diagnostic()?;
        for example in &report.examples {
            tracing::warn!("{example}");
        }
        eprintln!("{what}: {report}");
        Ok(sequences)
    }

    /// Extracts the states that the store lacks.
    pub fn extract(&self, model: &TargetModel, sequences: &[&TrainSequence], signals: &Signals) -> Result<Extracted> {
        let done =
            extract(model, &self.store, sequences, self.recipe.features.batch_tokens, signals).into_diagnostic()?;
        eprintln!(
            "states: {} sequences extracted ({} tokens in {:.0} s), {} found, in {}",
            done.extracted,
            done.tokens,
            done.seconds,
            done.found,
            self.store.folder().display()
        );
        Ok(done)
    }

    /// Tokens that are always in the draft vocabulary: the tokenizer's special ones, and the family's.
    pub fn always(&self) -> Result<Vec<u32>> {
        let mut ids = self.files.tokenizer().into_diagnostic()?.special_ids();
        ids.extend(self.family.iter().flat_map(Family::always));
        ids.extend(&self.files.config.eos_token_ids);
        ids.retain(|&id| (id as usize) < self.files.config.vocab_size);
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// The draft vocabulary counted over training sequences.
    pub fn vocab(&self, train: &[TrainSequence], size: usize) -> Result<DraftVocab> {
        let supervised = train.iter().map(|s| (&s.ids[..], &s.loss_mask[..]));
        let target = self.files.config.vocab_size;
        let (vocab, coverage) = DraftVocab::count(supervised, size, target, &self.always()?).into_diagnostic()?;
        let share = coverage.share() * 100.0;
        eprintln!("draft vocabulary: {} of {target} tokens cover {share:.2}% of the supervised tokens", vocab.len());
        Ok(vocab)
    }

    /// What training needs of the target.
    pub fn teacher(&self, model: &TargetModel, vocab: &DraftVocab) -> Teacher {
        Teacher {
            embeddings: model.embeddings().clone(),
            norm: model.final_norm().clone(),
            rms_norm_eps: self.files.config.rms_norm_eps,
            head_rows: model.head_rows(vocab.ids()),
        }
    }

    /// A sequence with its states.
    pub fn document(&self, sequence: &TrainSequence) -> Result<Document, String> {
        let states = self.store.load(sequence).map_err(|e| e.to_string())?;
        let (aux, last) = states.split();
        Ok(Document { ids: sequence.ids.clone(), loss_mask: sequence.loss_mask.clone(), aux, last })
    }

    /// Held-out sequences with the target's greedy tokens over its whole vocabulary.
    pub fn held_out(&self, model: &TargetModel, sequences: &[&TrainSequence]) -> Result<HeldOut> {
        let documents: Vec<Document> =
            sequences.iter().map(|s| self.document(s)).collect::<Result<_, _>>().map_err(|e| miette!("{e}"))?;
        let (hidden, vocab) = (self.files.config.hidden_size, self.files.config.vocab_size);
        Ok(HeldOut::new(documents, |last| {
            let rows: Tensor<2> =
                Tensor::from_data(TensorData::new(last.to_vec(), [last.len() / hidden, hidden]), &self.device);
            host_rows(model.logits(rows)).chunks_exact(vocab).map(|row| argmax(row) as u32).collect()
        }))
    }

    /// The head's shape under the recipe.
    pub fn draft_config(&self) -> Result<DraftConfig> {
        DraftConfig::new(&self.files.config, &self.recipe.draft, &self.store.layers).into_diagnostic()
    }

    /// The target's last layer, where a head of this shape can begin with it.
    pub fn lent_layer(&self, draft: &DraftConfig) -> Result<Option<LentLayer>> {
        let target = &self.files.config;
        let shape = |heads, kv, dim, intermediate, hidden| [heads, kv, dim, intermediate, hidden];
        let ours = shape(
            draft.num_attention_heads,
            draft.num_key_value_heads,
            draft.head_dim,
            draft.intermediate_size,
            draft.hidden_size,
        );
        let theirs = shape(
            target.num_attention_heads,
            target.num_key_value_heads,
            target.head_dim,
            target.intermediate_size,
            target.hidden_size,
        );
        if ours != theirs {
            tracing::info!("the draft's layer has another shape than the target's and begins at random");
            return Ok(None);
        }
        let layer = target.num_hidden_layers - 1;
        let weight = |name: &str| {
            let name = format!("model.layers.{layer}.{name}.weight");
            self.files.tensor(&name).map(|tensor| tensor.data).into_diagnostic()
        };
        Ok(Some(LentLayer {
            q: weight("self_attn.q_proj")?,
            k: weight("self_attn.k_proj")?,
            v: weight("self_attn.v_proj")?,
            o: weight("self_attn.o_proj")?,
            gate: weight("mlp.gate_proj")?,
            up: weight("mlp.up_proj")?,
            down: weight("mlp.down_proj")?,
            input_norm: weight("input_layernorm")?,
            post_norm: weight("post_attention_layernorm")?,
        }))
    }

    /// The objective that held-out figures are counted under.
    pub fn objective(&self) -> Objective {
        let train = &self.recipe.train;
        Objective { loss: train.loss, steps: train.ttt_steps, decay: train.step_decay }
    }

    /// Decodes the held-out prompts, and once more without the head where `compare` is set; `None` when a signal came.
    pub fn decode(
        &self,
        speculator: &Speculator,
        held_out: &[TrainSequence],
        compare: bool,
        signals: &Signals,
    ) -> Result<Option<DecodeReport>> {
        let k = speculator.k;
        let evaluate = &self.recipe.evaluate;
        let context = self.files.config.max_position_embeddings;
        let mut prompts: Vec<Prompt> = held_out
            .iter()
            .filter(|s| s.prompt_length > 0 && s.prompt_length + k + 2 < context)
            .map(|s| Prompt {
                dataset: s.dataset.clone(),
                request: Request {
                    name: s.id.clone(),
                    prompt: s.ids[..s.prompt_length].to_vec(),
                    max_tokens: evaluate.max_tokens.min(context - s.prompt_length - k - 1),
                },
            })
            .collect();
        if evaluate.prompts > 0 && evaluate.prompts < prompts.len() {
            // Evenly from all, so that every dataset keeps its share.
            let all = prompts.len();
            prompts = (0..evaluate.prompts).map(|i| prompts[i * all / evaluate.prompts].clone()).collect();
        }
        if prompts.is_empty() {
            return Err(miette!("no held-out prompts to decode; name some in data.held_out"));
        }
        let bar = progress::bar(
            prompts.len() as u64 * if compare { 2 } else { 1 },
            "evaluate {wide_bar} {pos}/{len} answers  {eta} left",
        );
        let report = decode(speculator, &prompts, evaluate.batch, evaluate.seed, compare, || {
            bar.inc(1);
            signals.received().is_none()
        });
        bar.finish_and_clear();
        Ok(report)
    }

    /// A hash of the training sequences and the draft vocabulary: a checkpoint goes on only with the same.
    pub fn data_hash(&self, train: &[TrainSequence], vocab: &DraftVocab) -> String {
        let mut hash = Sha256::new();
        for sequence in train {
            hash.update((sequence.ids.len() as u64).to_le_bytes());
            sequence.ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
            sequence.loss_mask.iter().for_each(|&m| hash.update([u8::from(m)]));
            hash.update(self.store.path(&sequence.ids).file_name().map_or(&[][..], |name| name.as_encoded_bytes()));
        }
        vocab.ids().iter().for_each(|id| hash.update(id.to_le_bytes()));
        hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }

    /// How a user would name the target to an engine: its folder, or the hub's name where only a GGUF file is here.
    pub fn target_name(&self) -> String {
        match (&self.recipe.target.hub, self.files.path.join("config.json").is_file()) {
            (Some(hub), false) => hub.clone(),
            (None, false) if self.family.is_some() => self.family.as_ref().map_or(String::new(), |f| f.hub.clone()),
            _ => self.files.path.display().to_string(),
        }
    }
}

/// A head's folder on the device.
pub fn load_head(folder: &Path, device: &Device) -> Result<(DraftHead, DraftVocab)> {
    let read = eaglet::export::read_head(folder).into_diagnostic()?;
    read.notes.iter().for_each(|note| tracing::info!("{}: {note}", folder.display()));
    let head = DraftHead::from_tensors(read.config, &read.tensors, device).into_diagnostic()?;
    Ok((head, read.vocab))
}
