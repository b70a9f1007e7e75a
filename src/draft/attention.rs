//! TTT attention, forward and backward, in blocks of query rows.
//!
//! At step k a query sees the keys of step 0 up to its own row of its own document, and of each later step 1..=k only
//! the key at its own row. The softmax runs over both together:
//!
//! `o_i = sum_{j<=i} p_ij v0_j + sum_{1<=m<=k} p_im v^m_i`, `p = softmax(q k / sqrt(head_dim))`.
//!
//! Neither pass holds more than one block's scores, `[heads, BLOCK, keys]`: the backward computes the block's softmax
//! again instead of keeping it. Everything is plain tensors, so it runs on any Burn device, and the gradient is ours:
//! `dS = P * (dP - rowsum(dO * O))` (FlashAttention, Dao et al. 2022, appendix B).

use std::ops::Range;

use burn::tensor::{Tensor, TensorData, activation};

/// Query rows handled at once.
const BLOCK: usize = 128;

/// The head counts of a grouped-query attention.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    pub query: usize,
    pub kv: usize,
    pub dim: usize,
}

/// Where a packed document's rows lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DocumentRows {
    /// Its rows among all rows: the keys of step 0.
    pub rows: Range<usize>,
    /// Its rows among the query rows.
    pub queries: Range<usize>,
    /// Which of its own rows the first query is; the queries follow one another.
    pub first: usize,
}

/// The gradients of [`backward`], each shaped like its input.
pub struct AttentionGradients {
    pub q: Tensor<2>,
    pub k0: Tensor<2>,
    pub v0: Tensor<2>,
    pub later: Vec<(Tensor<2>, Tensor<2>)>,
}

/// The inputs of one step's attention.
///
/// `q` `[queries, heads * dim]`; `k0`, `v0` `[rows, kv * dim]`, the keys and values of step 0; `later` the keys and
/// values of steps 1..=k at the query rows, `[queries, kv * dim]` each.
#[derive(Clone)]
pub struct AttentionInputs<'a> {
    pub q: Tensor<2>,
    pub k0: Tensor<2>,
    pub v0: Tensor<2>,
    pub later: Vec<(Tensor<2>, Tensor<2>)>,
    pub documents: &'a [DocumentRows],
    pub heads: Heads,
}

/// One block's view of the inputs, heads first.
struct Block {
    /// `[kv, group * rows, dim]`
    q: Tensor<3>,
    /// `[kv, keys, dim]`
    k0: Tensor<3>,
    v0: Tensor<3>,
    /// `[kv, 1, rows, dim]` each
    later: Vec<(Tensor<4>, Tensor<4>)>,
    /// `[kv, group * rows, keys + later]`
    p: Tensor<3>,
    rows: usize,
    keys: usize,
}

/// Attends; the result is shaped like `q`.
pub fn forward(inputs: &AttentionInputs) -> Tensor<2> {
    let heads = inputs.heads;
    let mut parts = Vec::new();
    for (document, block) in blocks(inputs.documents) {
        let block = Block::open(inputs, document, block);
        let p0 = block.p.clone().narrow(2, 0, block.keys);
        let mut out = block.grouped(p0.matmul(block.v0.clone()), heads);
        for (m, (_, v)) in block.later.iter().enumerate() {
            out = out + block.later_weight(m, heads) * v.clone();
        }
        parts.push(block.rows_first(out, heads));
    }
    cat_rows(parts, &inputs.q)
}

/// The gradients of all inputs from the output `output` and its gradient `d_output`, both shaped like `q`.
pub fn backward(inputs: &AttentionInputs, output: Tensor<2>, d_output: Tensor<2>) -> AttentionGradients {
    let heads = inputs.heads;
    let scale = 1.0 / (heads.dim as f64).sqrt();
    let mut dq = Vec::new();
    let mut dk0 = Vec::new();
    let mut dv0 = Vec::new();
    let mut later: Vec<(Vec<Tensor<2>>, Vec<Tensor<2>>)> = vec![Default::default(); inputs.later.len()];
    for document in inputs.documents {
        let keys = document.rows.len();
        let mut document_dk = Tensor::<3>::zeros([heads.kv, keys, heads.dim], &inputs.q.device());
        let mut document_dv = document_dk.clone();
        for (_, range) in blocks(std::slice::from_ref(document)) {
            let block = Block::open(inputs, document, range.clone());
            let at = document.queries.start + range.start;
            let o = heads_first(output.clone().narrow(0, at, block.rows), heads.kv, heads.dim);
            let d_o = heads_first(d_output.clone().narrow(0, at, block.rows), heads.kv, heads.dim);
            let delta = (o * d_o.clone()).sum_dim(2);
            let p0 = block.p.clone().narrow(2, 0, block.keys);
            let dp0 = d_o.clone().matmul(block.v0.clone().transpose());
            let ds0 = p0.clone() * (dp0 - delta.clone()) * scale;

            let all = [0..heads.kv, 0..block.keys, 0..heads.dim];
            let dv = p0.transpose().matmul(d_o.clone());
            let dk = ds0.clone().transpose().matmul(block.q.clone());
            document_dv = add_at(document_dv, all.clone(), dv);
            document_dk = add_at(document_dk, all, dk);

            let mut d_query = block.grouped(ds0.matmul(block.k0.clone()), heads);
            let d_o = block.grouped(d_o, heads);
            let delta = delta.reshape([heads.kv, heads.query / heads.kv, block.rows, 1]);
            let query = block.grouped(block.q.clone(), heads);
            for (m, (k, v)) in block.later.iter().enumerate() {
                let p = block.later_weight(m, heads);
                let dp = (d_o.clone() * v.clone()).sum_dim(3);
                let ds = p.clone() * (dp - delta.clone()) * scale;
                d_query = d_query + ds.clone() * k.clone();
                let dk = (ds * query.clone()).sum_dim(1);
                let dv = (p * d_o.clone()).sum_dim(1);
                later[m].0.push(kv_rows_first(dk));
                later[m].1.push(kv_rows_first(dv));
            }
            dq.push(block.rows_first(d_query, heads));
        }
        dk0.push(kv_rows_first(document_dk.unsqueeze_dim(1)));
        dv0.push(kv_rows_first(document_dv.unsqueeze_dim(1)));
    }
    AttentionGradients {
        q: cat_rows(dq, &inputs.q),
        k0: cat_rows(dk0, &inputs.k0),
        v0: cat_rows(dv0, &inputs.v0),
        later: later
            .into_iter()
            .zip(&inputs.later)
            .map(|((dk, dv), (k, v))| (cat_rows(dk, k), cat_rows(dv, v)))
            .collect(),
    }
}

/// Query ranges, counted from each document's first query, of at most [`BLOCK`] rows.
fn blocks(documents: &[DocumentRows]) -> impl Iterator<Item = (&DocumentRows, Range<usize>)> {
    documents.iter().flat_map(|document| {
        let queries = document.queries.len();
        (0..queries).step_by(BLOCK).map(move |start| (document, start..(start + BLOCK).min(queries)))
    })
}

impl Block {
    fn open(inputs: &AttentionInputs, document: &DocumentRows, range: Range<usize>) -> Self {
        let Heads { query, kv, dim } = inputs.heads;
        let group = query / kv;
        let rows = range.len();
        let at = document.queries.start + range.start;
        // The block's last query is this row of the document and sees that many step-0 keys.
        let keys = document.first + range.end;
        let q = heads_first(inputs.q.clone().narrow(0, at, rows), kv, dim);
        let k0 = heads_first(inputs.k0.clone().narrow(0, document.rows.start, keys), kv, dim);
        let v0 = heads_first(inputs.v0.clone().narrow(0, document.rows.start, keys), kv, dim);
        let later: Vec<_> = inputs
            .later
            .iter()
            .map(|(k, v)| {
                let open = |x: &Tensor<2>| heads_first(x.clone().narrow(0, at, rows), kv, dim).unsqueeze_dim::<4>(1);
                (open(k), open(v))
            })
            .collect();
        let scale = 1.0 / (dim as f64).sqrt();
        let query_scaled = q.clone() * scale;
        let scores = query_scaled.clone().matmul(k0.clone().transpose());
        let scores = scores + causal_mask(rows, keys, group, &inputs.q);
        let mut columns = vec![scores];
        let grouped = query_scaled.reshape([kv, group, rows, dim]);
        for (k, _) in &later {
            columns.push((grouped.clone() * k.clone()).sum_dim(3).reshape([kv, group * rows, 1]));
        }
        let scores = if columns.len() == 1 { columns.remove(0) } else { Tensor::cat(columns, 2) };
        let p = activation::softmax(scores, 2);
        Self { q, k0, v0, later, p, rows, keys }
    }

    /// `[kv, group * rows, dim]` as `[kv, group, rows, dim]`.
    fn grouped(&self, x: Tensor<3>, heads: Heads) -> Tensor<4> {
        x.reshape([heads.kv, heads.query / heads.kv, self.rows, heads.dim])
    }

    /// The weights on the key of later step `m`, `[kv, group, rows, 1]`.
    fn later_weight(&self, m: usize, heads: Heads) -> Tensor<4> {
        let column = self.p.clone().narrow(2, self.keys + m, 1);
        column.reshape([heads.kv, heads.query / heads.kv, self.rows, 1])
    }

    /// `[kv, group, rows, dim]` as `[rows, heads * dim]`.
    fn rows_first(&self, x: Tensor<4>, heads: Heads) -> Tensor<2> {
        x.permute([2, 0, 1, 3]).reshape([self.rows, heads.query * heads.dim])
    }
}

/// `[rows, kv * group * dim]` as `[kv, group * rows, dim]`.
fn heads_first(x: Tensor<2>, kv: usize, dim: usize) -> Tensor<3> {
    let [rows, width] = x.dims();
    let group = width / (kv * dim);
    x.reshape([rows, kv, group, dim]).permute([1, 2, 0, 3]).reshape([kv, group * rows, dim])
}

/// `[kv, 1, rows, dim]` as `[rows, kv * dim]`.
fn kv_rows_first(x: Tensor<4>) -> Tensor<2> {
    let [kv, _, rows, dim] = x.dims();
    x.permute([2, 0, 1, 3]).reshape([rows, kv * dim])
}

fn cat_rows(parts: Vec<Tensor<2>>, like: &Tensor<2>) -> Tensor<2> {
    if parts.is_empty() { like.zeros_like() } else { Tensor::cat(parts, 0) }
}

fn add_at(into: Tensor<3>, range: [Range<usize>; 3], value: Tensor<3>) -> Tensor<3> {
    let sum = into.clone().slice(range.clone()) + value;
    into.slice_assign(range, sum)
}

/// 0 where a query may look and -inf where not, `[1, group * rows, keys]`: query r sees `keys - rows + r + 1` keys.
fn causal_mask(rows: usize, keys: usize, group: usize, like: &Tensor<2>) -> Tensor<3> {
    let mut mask = vec![0f32; rows * keys];
    for r in 0..rows {
        mask[r * keys + (keys - rows + r + 1)..(r + 1) * keys].fill(f32::NEG_INFINITY);
    }
    let mask: Tensor<2> = Tensor::from_data(TensorData::new(mask, [rows, keys]), &like.device());
    mask.repeat_dim(0, group).unsqueeze_dim(0)
}
