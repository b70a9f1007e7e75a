//! The head, the softmax, the loss and their gradient in one pass over row blocks.
//!
//! Logits live only for a block of rows: each block's gradient with respect to the normed output (and to `lm_head`
//! when it trains) is formed at once from the closed form of the loss, so nothing of size rows x draft vocabulary is
//! kept for a backward pass. With `p` the target's and `q` the draft's distribution over the draft vocabulary:
//!
//! | loss | value | d/d logits |
//! | --- | --- | --- |
//! | `kl_div` | `sum p (log p - log q)` | `q - p` |
//! | `ce` | `-log q[argmax p]` | `q - onehot(argmax p)` |
//! | `nla` | `-log a`, `a = sum min(p, q)` | `-q (s - sum s q) / a`, `s = [q < p]` |
//! | `lk_hybrid` | `w KL + (1-w)(1-a)`, `w = exp(-3 a)` held fixed | `w (q - p) - (1-w) q (s - sum s q)` |
//!
//! `nla` and `lk_hybrid` are the LK losses of speculators 0.9.0; the acceptance rate of speculative sampling is `a`.

use burn::tensor::{IndexingUpdateOp, Int, Tensor, activation};

use super::head::DraftHead;
use crate::recipe::LossKind;
use crate::target::model::index;

/// Rows whose logits exist together.
const BLOCK: usize = 256;

/// What the target would say at each supervised position, over the draft vocabulary.
#[derive(Debug, Clone)]
pub struct TargetDistribution {
    /// `[targets, draft_vocab]`, each row sums to one.
    p: Tensor<2>,
    /// `sum p log p`, `[targets, 1]`.
    negative_entropy: Tensor<2>,
    /// The likeliest draft-vocabulary index of each row.
    pub top: Vec<u32>,
}

impl TargetDistribution {
    /// From the target's logits over the draft vocabulary, `[targets, draft_vocab]`.
    pub fn new(logits: Tensor<2>) -> Self {
        let (p, log_sum, top) = softmax_with_log_sum(logits.clone());
        let negative_entropy = (p.clone() * logits).sum_dim(1) - log_sum;
        Self { p, negative_entropy, top: to_ids(top) }
    }

    /// How many targets.
    pub fn len(&self) -> usize {
        self.top.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.top.is_empty()
    }
}

/// One step's loss over its counted rows.
pub struct HeadLoss {
    /// Sum of `weight * loss` over the rows.
    pub sum: f64,
    /// The gradient at the normed output, `[rows, hidden]`.
    pub d_normed: Option<Tensor<2>>,
    /// The gradient of `lm_head`, `[draft_vocab, hidden]`.
    pub d_head: Option<Tensor<2>>,
    /// The draft's likeliest draft-vocabulary index of each row.
    pub top: Vec<u32>,
}

/// What to compute beside the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gradient {
    None,
    Output,
    OutputAndHead,
}

/// The loss of `normed` `[rows, hidden]` against the targets at `targets` (one a row), each row times `weight`.
pub fn head_loss(
    head: &DraftHead,
    kind: LossKind,
    normed: Tensor<2>,
    target: &TargetDistribution,
    targets: &[usize],
    weight: f64,
    gradient: Gradient,
) -> HeadLoss {
    let device = normed.device();
    let every = targets.len() == target.len();
    let mut result = HeadLoss { sum: 0.0, d_normed: None, d_head: None, top: Vec::with_capacity(targets.len()) };
    let mut d_normed = Vec::new();
    for start in (0..targets.len()).step_by(BLOCK) {
        let rows = BLOCK.min(targets.len() - start);
        let h = normed.clone().narrow(0, start, rows);
        let logits = head.logits(h.clone());
        // All targets in their order is the common case (step 0), and needs no gather.
        let pick = |x: &Tensor<2>| {
            if every {
                x.clone().narrow(0, start, rows)
            } else {
                x.clone().select(0, index(targets[start..start + rows].iter().copied(), &device))
            }
        };
        let p = pick(&target.p);
        let (q, log_sum, top) = softmax_with_log_sum(logits.clone());
        result.top.extend(to_ids(top));
        let kl = |logits: Tensor<2>| pick(&target.negative_entropy) - (p.clone() * logits).sum_dim(1) + log_sum.clone();
        let (loss, d_logits) = match kind {
            LossKind::KlDiv => (kl(logits), q - p.clone()),
            LossKind::Ce => {
                let ids: Vec<usize> = targets[start..start + rows].iter().map(|&t| target.top[t] as usize).collect();
                let ids = index(ids, &device).reshape([rows, 1]);
                let loss = log_sum.clone() - logits.gather(1, ids.clone());
                let minus_one = Tensor::full([rows, 1], -1.0, &device);
                (loss, q.scatter(1, ids, minus_one, IndexingUpdateOp::Add))
            }
            LossKind::Nla | LossKind::LkHybrid => {
                let alpha = p.clone().min_pair(q.clone()).sum_dim(1);
                let sign = q.clone().lower(p.clone()).float();
                let inside = (sign.clone() * q.clone()).sum_dim(1);
                // d alpha / d logits
                let d_alpha = q.clone() * (sign - inside);
                if kind == LossKind::Nla {
                    (alpha.clone().log().neg(), d_alpha.neg() / alpha)
                } else {
                    let w = (alpha.clone() * -3.0).exp();
                    let rest = w.clone().neg() + 1.0;
                    let loss = w.clone() * kl(logits) + rest.clone() * (alpha.neg() + 1.0);
                    (loss, w * (q - p.clone()) - rest * d_alpha)
                }
            }
        };
        result.sum += weight * loss.sum().into_scalar::<f32>() as f64;
        if gradient == Gradient::None {
            continue;
        }
        let d_logits = d_logits * weight;
        if gradient == Gradient::OutputAndHead {
            let d_head = d_logits.clone().transpose().matmul(h);
            result.d_head = Some(match result.d_head.take() {
                Some(sum) => sum + d_head,
                None => d_head,
            });
        }
        d_normed.push(d_logits.matmul(head.weight("lm_head.weight")));
    }
    if !d_normed.is_empty() {
        result.d_normed = Some(Tensor::cat(d_normed, 0));
    }
    result
}

/// Softmax over the last dimension, `log sum exp` `[rows, 1]` and the index of the largest logit `[rows, 1]`.
///
/// The log-sum comes from the softmax at the largest logit, which is at least 1 / width and so never underflows.
fn softmax_with_log_sum(logits: Tensor<2>) -> (Tensor<2>, Tensor<2>, Tensor<2, Int>) {
    let softmax = activation::softmax(logits.clone(), 1);
    let (largest, top) = logits.max_dim_with_indices(1);
    let log_sum = largest - softmax.clone().gather(1, top.clone()).log();
    (softmax, log_sum, top)
}

fn to_ids(index: Tensor<2, Int>) -> Vec<u32> {
    index
        .into_data()
        .convert::<i64>()
        .try_to_vec::<i64>()
        .expect("indices are integers")
        .iter()
        .map(|&i| i as u32)
        .collect()
}
