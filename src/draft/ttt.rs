//! One training-time-test (TTT) step over packed documents: the unroll, its loss and its gradients.
//!
//! For a document of n tokens x, aux states g, last states y and loss mask m, row i of 0..n-1 pairs feature g[i] with
//! token x[i+1]; at TTT step k it is fed x[i+1+k] and its own last output, and is compared with what the target says
//! after x[i+1+k], `p = softmax(head(norm(y[i+1+k])))` over the draft vocabulary, where m[i+1+k] is set
//! (speculators 0.9.0; the rules stand in `tests/golden/README.md`). The loss is
//! `sum over k of decay^k * (sum of the counted rows' loss) / (counted rows + 1e-5)`.
//!
//! The backward pass is cut at each attention. What lies between two attentions (see [`DraftHead::project`] and
//! [`DraftHead::finish`]) is differentiated by Burn; attention and the head with its loss bring their own gradients,
//! so neither a score matrix nor logits outlive their block.
//!
//! Only rows that some step counts are queries. Prompt rows further back serve step 0 as keys and values alone.

use std::collections::BTreeMap;

use burn::tensor::{Device, Gradients, IndexingUpdateOp, Tensor, TensorData};

use super::attention::{self, AttentionInputs, DocumentRows, Heads};
use super::head::{DraftHead, Projected, Rotation};
use super::loss::{Gradient, TargetDistribution, head_loss};
use crate::recipe::LossKind;
use crate::target::model::{index, rms_norm};
use crate::target::rope::RopeTable;

/// One sequence with its target's states.
#[derive(Debug, Clone)]
pub struct Document {
    /// Prompt and output, n tokens.
    pub ids: Vec<u32>,
    /// Which of the n tokens are supervised.
    pub loss_mask: Vec<bool>,
    /// The aux hidden states, `[n, layers * target_hidden]`, row-major, low layer first.
    pub aux: Vec<f32>,
    /// The stream after the last layer, before the final norm, `[n, target_hidden]`.
    pub last: Vec<f32>,
}

/// The parts of the target that training needs.
#[derive(Debug, Clone)]
pub struct Teacher {
    /// Embedding rows, `[vocab, target_hidden]`.
    pub embeddings: Tensor<2>,
    /// The final norm's gain, `[1, target_hidden]`.
    pub norm: Tensor<2>,
    pub rms_norm_eps: f64,
    /// The head's rows of the draft vocabulary, `[draft_vocab, target_hidden]`.
    pub head_rows: Tensor<2>,
}

impl Teacher {
    /// Embeddings of `ids`, `[ids, target_hidden]`.
    pub fn embed(&self, ids: &[u32]) -> Tensor<2> {
        let rows = ids.iter().map(|&id| id as usize);
        self.embeddings.clone().select(0, index(rows, &self.embeddings.device()))
    }

    /// The target's distributions over the draft vocabulary after its last states `[rows, target_hidden]`.
    pub fn distribution(&self, last: Tensor<2>) -> TargetDistribution {
        let normed = rms_norm(last, self.norm.clone(), self.rms_norm_eps);
        TargetDistribution::new(normed.matmul(self.head_rows.clone().transpose()))
    }
}

/// Which rows of a step are compared with which targets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counted {
    /// Among the query rows.
    pub rows: Vec<usize>,
    /// Among the batch's targets.
    pub targets: Vec<usize>,
}

/// Packed documents as index lists: who is fed what, who sees whom, who is compared with what.
#[derive(Debug, Clone)]
pub struct Layout {
    pub documents: Vec<DocumentRows>,
    /// The row of each query.
    pub queries: Vec<usize>,
    /// Per step the tokens fed: to every row at step 0, to the query rows later.
    pub tokens: Vec<Vec<u32>>,
    /// Per step the RoPE positions of those rows.
    pub positions: Vec<Vec<usize>>,
    /// `(document, token)` of each target: the target's state at that token foretells the next.
    pub targets: Vec<(usize, usize)>,
    pub counted: Vec<Counted>,
}

impl Layout {
    /// Lays out documents of `(ids, loss_mask)`, those without a supervised token left empty.
    pub fn new(documents: &[(&[u32], &[bool])], steps: usize) -> Self {
        let mut layout = Self {
            documents: Vec::new(),
            queries: Vec::new(),
            tokens: vec![Vec::new(); steps],
            positions: vec![Vec::new(); steps],
            targets: Vec::new(),
            counted: vec![Counted::default(); steps],
        };
        let mut rows = 0;
        for (d, (ids, loss_mask)) in documents.iter().enumerate() {
            let supervised: Vec<usize> = (1..ids.len()).filter(|&t| loss_mask[t]).map(|t| t - 1).collect();
            let (Some(&lowest), Some(&highest)) = (supervised.first(), supervised.last()) else {
                layout.documents.push(DocumentRows {
                    rows: rows..rows,
                    queries: layout.queries.len()..layout.queries.len(),
                    first: 0,
                });
                continue;
            };
            // Keys after the last query are never seen.
            let first = lowest.saturating_sub(steps - 1);
            let length = highest + 1;
            let queries = layout.queries.len()..layout.queries.len() + (length - first);
            layout.queries.extend(rows + first..rows + length);
            for k in 0..steps {
                let fed = if k == 0 { 0..length } else { first..length };
                layout.tokens[k].extend(fed.clone().map(|i| ids[(i + 1 + k).min(ids.len() - 1)]));
                layout.positions[k].extend(fed.map(|i| i + 1 + k));
            }
            for &j in &supervised {
                let target = layout.targets.len();
                layout.targets.push((d, j + 1));
                for (k, counted) in layout.counted.iter_mut().enumerate() {
                    if j >= k {
                        counted.rows.push(queries.start + (j - k) - first);
                        counted.targets.push(target);
                    }
                }
            }
            layout.documents.push(DocumentRows { rows: rows..rows + length, queries, first });
            rows += length;
        }
        layout
    }

    /// Rows compared at each step.
    pub fn counts(&self) -> Vec<usize> {
        self.counted.iter().map(|counted| counted.rows.len()).collect()
    }
}

/// What a TTT step is asked to do.
#[derive(Debug, Clone, Copy)]
pub struct Objective {
    pub loss: LossKind,
    /// TTT steps.
    pub steps: usize,
    /// Step k weighs `decay^k`.
    pub decay: f64,
}

/// One step's figures.
#[derive(Debug, Clone, Default)]
pub struct StepFigures {
    /// The weighted loss.
    pub loss: f64,
    /// The draft's likeliest draft-vocabulary index of each counted row.
    pub draft_top: Vec<u32>,
    /// The target's.
    pub target_top: Vec<u32>,
}

/// The result of [`step`].
pub struct TttOutput {
    pub loss: f64,
    pub steps: Vec<StepFigures>,
    pub layout: Layout,
    /// The gradient of each trained weight; empty when none was asked for.
    pub gradients: BTreeMap<String, Tensor<2>>,
}

/// A TTT step's forward parts that the backward pass needs.
struct Taken {
    projected: Projected,
    attended: Tensor<2>,
    output: Tensor<2>,
    normed: Tensor<2>,
    /// The leaves the two halves were fed.
    feature: Tensor<2>,
    attended_leaf: Tensor<2>,
    residual_leaf: Tensor<2>,
    d_normed: Tensor<2>,
}

/// Runs one TTT step on packed documents.
///
/// `counts` are the counted rows of each step over *all* packs of the optimizer step, so that accumulation weighs
/// rows, not packs. `trained` names the weights whose gradients are wanted; none evaluates only.
pub fn step(
    head: &DraftHead,
    teacher: &Teacher,
    rope: &RopeTable,
    documents: &[Document],
    objective: Objective,
    counts: &[usize],
    trained: &[String],
) -> TttOutput {
    let device = teacher.embeddings.device();
    let views: Vec<_> = documents.iter().map(|d| (&d.ids[..], &d.loss_mask[..])).collect();
    let layout = Layout::new(&views, objective.steps);
    let mut result = TttOutput {
        loss: 0.0,
        steps: vec![StepFigures::default(); objective.steps],
        layout: layout.clone(),
        gradients: BTreeMap::new(),
    };
    if layout.targets.is_empty() {
        return result;
    }
    let training = !trained.is_empty();
    let gradient = match (training, trained.iter().any(|name| name == "lm_head.weight")) {
        (false, _) => Gradient::None,
        (true, false) => Gradient::Output,
        (true, true) => Gradient::OutputAndHead,
    };
    let config = &head.config;
    let heads = Heads { query: config.num_attention_heads, kv: config.num_key_value_heads, dim: config.head_dim };
    let tracked = head.track(trained);
    let leaf = |x: Tensor<2>| if training { x.autodiff().require_grad() } else { x };

    let aux = gather_rows(documents, &layout, |d| &d.aux, &device);
    let fused = tracked.fuse(aux);
    let target = teacher.distribution(gather_targets(documents, &layout, &device));

    let queries = index(layout.queries.iter().copied(), &device);
    let mut taken: Vec<Taken> = Vec::new();
    let mut feature = plain(fused.clone());
    for (k, &all_counted) in counts.iter().enumerate().take(objective.steps) {
        let (cos, sin) = rope.rows(&layout.positions[k]);
        let rotation = Rotation { cos, sin };
        let feature_leaf = leaf(feature);
        let embeds = teacher.embed(&layout.tokens[k]);
        let selected = (k == 0).then(|| queries.clone());
        let projected = tracked.project(embeds, feature_leaf.clone(), &rotation, selected);
        let inputs = attention_inputs(&taken, &projected, &layout.documents, heads);
        let attended = attention::forward(&inputs);
        let attended_leaf = leaf(attended.clone());
        let residual_leaf = leaf(plain(projected.residual.clone()));
        let (output, normed) = tracked.finish(attended_leaf.clone(), residual_leaf.clone());

        let counted = &layout.counted[k];
        let rows = index(counted.rows.iter().copied(), &device);
        let flat = plain(normed.clone());
        let weight = objective.decay.powi(k as i32) / (all_counted as f64 + 1e-5);
        let picked = flat.clone().select(0, rows.clone());
        let loss = head_loss(head, objective.loss, picked, &target, &counted.targets, weight, gradient);
        result.loss += loss.sum;
        result.steps[k] = StepFigures {
            loss: loss.sum,
            draft_top: loss.top,
            target_top: counted.targets.iter().map(|&t| target.top[t]).collect(),
        };
        if let Some(d_head) = loss.d_head {
            add_to(&mut result.gradients, "lm_head.weight", d_head);
        }
        let d_normed = match loss.d_normed {
            Some(d) => flat.zeros_like().select_assign(0, rows, d, IndexingUpdateOp::Add),
            None => flat.zeros_like(),
        };
        feature = plain(tracked.next_feature(output.clone(), normed.clone()));
        taken.push(Taken {
            projected,
            attended,
            output,
            normed,
            feature: feature_leaf,
            attended_leaf,
            residual_leaf,
            d_normed,
        });
    }
    if !training {
        return result;
    }
    backward(&tracked, trained, taken, fused, &layout.documents, heads, &mut result.gradients);
    result
}

/// Walks the steps backwards and adds each trained weight's gradient to `sums`.
fn backward(
    tracked: &DraftHead,
    trained: &[String],
    mut taken: Vec<Taken>,
    fused: Tensor<2>,
    documents: &[DocumentRows],
    heads: Heads,
    sums: &mut BTreeMap<String, Tensor<2>>,
) {
    let mut collect = |gradients: &Gradients| {
        for name in trained {
            if let Some(gradient) = tracked.weight(name).grad(gradients) {
                add_to(sums, name, gradient);
            }
        }
    };
    // Gradients at each step's keys and values, filled by that step and all later ones.
    let mut d_kv: Vec<Option<(Tensor<2>, Tensor<2>)>> = vec![None; taken.len()];
    let mut d_feature: Option<Tensor<2>> = None;
    while let Some(last) = taken.pop() {
        let k = taken.len();
        let mut outputs = vec![(last.normed.clone(), last.d_normed.clone())];
        if let Some(d) = d_feature.take() {
            outputs.push((tracked.next_feature(last.output.clone(), last.normed.clone()), d));
        }
        let gradients = pull(outputs);
        collect(&gradients);
        let d_attended = last.attended_leaf.grad(&gradients).expect("attention feeds the output");
        let d_residual = last.residual_leaf.grad(&gradients).expect("the residual feeds the output");

        let inputs = attention_inputs(&taken, &last.projected, documents, heads);
        let back = attention::backward(&inputs, last.attended.clone(), d_attended);
        add_pair(&mut d_kv[0], (back.k0, back.v0));
        for (m, pair) in back.later.into_iter().enumerate() {
            add_pair(&mut d_kv[m + 1], pair);
        }
        let (dk, dv) = d_kv[k].take().expect("a step sees its own keys");
        let Projected { q, k: keys, v, residual } = last.projected;
        let gradients = pull(vec![(q, back.q), (keys, dk), (v, dv), (residual, d_residual)]);
        collect(&gradients);
        d_feature = Some(last.feature.grad(&gradients).expect("the feature feeds the layer"));
    }
    let d_fused = d_feature.expect("at least one TTT step ran");
    if fused.is_autodiff() {
        collect(&pull(vec![(fused, d_fused)]));
    }
}

/// The keys of step 0 and of the later steps taken so far, with the current step's own as the last.
fn attention_inputs<'a>(
    taken: &[Taken],
    current: &Projected,
    documents: &'a [DocumentRows],
    heads: Heads,
) -> AttentionInputs<'a> {
    let mut kv: Vec<_> =
        taken.iter().map(|t| &t.projected).chain([current]).map(|p| (plain(p.k.clone()), plain(p.v.clone()))).collect();
    let (k0, v0) = kv.remove(0);
    AttentionInputs { q: plain(current.q.clone()), k0, v0, later: kv, documents, heads }
}

/// Differentiates `sum of outputs * their gradients`, which leaves at each leaf what the chain rule wants there.
fn pull(outputs: Vec<(Tensor<2>, Tensor<2>)>) -> Gradients {
    let sums = outputs.into_iter().map(|(output, gradient)| (output * gradient).sum());
    sums.reduce(|a, b| a + b).expect("at least one output").backward()
}

/// The value without its graph.
fn plain(x: Tensor<2>) -> Tensor<2> {
    if x.is_autodiff() { x.inner() } else { x }
}

fn add_to(sums: &mut BTreeMap<String, Tensor<2>>, name: &str, gradient: Tensor<2>) {
    let sum = match sums.remove(name) {
        Some(sum) => sum + gradient,
        None => gradient,
    };
    sums.insert(name.to_string(), sum);
}

fn add_pair(sum: &mut Option<(Tensor<2>, Tensor<2>)>, (dk, dv): (Tensor<2>, Tensor<2>)) {
    *sum = Some(match sum.take() {
        Some((k, v)) => (k + dk, v + dv),
        None => (dk, dv),
    });
}

/// The aux states of all rows, `[rows, width]`.
fn gather_rows(
    documents: &[Document],
    layout: &Layout,
    of: impl Fn(&Document) -> &Vec<f32>,
    device: &Device,
) -> Tensor<2> {
    let mut data = Vec::new();
    let mut rows = 0;
    for (document, at) in documents.iter().zip(&layout.documents) {
        let width = of(document).len() / document.ids.len();
        data.extend_from_slice(&of(document)[..at.rows.len() * width]);
        rows += at.rows.len();
    }
    let width = data.len() / rows;
    Tensor::from_data(TensorData::new(data, [rows, width]), device)
}

/// The last states of all targets, `[targets, target_hidden]`.
fn gather_targets(documents: &[Document], layout: &Layout, device: &Device) -> Tensor<2> {
    let mut data = Vec::new();
    for &(d, token) in &layout.targets {
        let document = &documents[d];
        let width = document.last.len() / document.ids.len();
        data.extend_from_slice(&document.last[token * width..(token + 1) * width]);
    }
    let targets = layout.targets.len();
    let width = data.len() / targets;
    Tensor::from_data(TensorData::new(data, [targets, width]), device)
}
