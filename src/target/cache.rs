//! The KV cache of a batch of rows that grow at their own pace.
//!
//! Every step writes one column range that all rows share; which columns a row may look at is a mask on the host.
//! Keys are rotated before they are stored, so a column may stand anywhere: taking back rejected drafts, dropping a
//! finished row and starting another in its place only change the mask. Columns nobody looks at any more are squeezed
//! out when room runs short.

use burn::tensor::{Device, Tensor, TensorData, activation};

use super::model::{LayerKeys, index};

/// Keys and values of `rows` sequences in each layer.
pub struct KvCache {
    /// `[rows, kv_heads, capacity, head_dim]` each. `None` only while a layer's tensor is being written.
    layers: Vec<Option<(Tensor<4>, Tensor<4>)>>,
    kv_heads: usize,
    head_dim: usize,
    capacity: usize,
    /// Columns written so far.
    used: usize,
    /// `visible[row][column]` for the written columns.
    visible: Vec<Vec<bool>>,
    /// The position of each row's next token.
    next: Vec<usize>,
    /// Columns of the step under way.
    fresh: usize,
    device: Device,
}

/// A step under way: what is the same for all its layers.
pub struct CacheStep {
    /// The position of each fed token, row after row.
    pub positions: Vec<usize>,
    heads: usize,
    fresh: usize,
    /// `[rows, 1, group * fresh, used + fresh]`, 0 or -inf.
    mask: Tensor<4>,
}

impl KvCache {
    /// An empty cache of `layers` layers for `rows` sequences.
    pub fn new(layers: usize, rows: usize, kv_heads: usize, head_dim: usize, device: &Device) -> Self {
        let capacity = 64;
        let empty = || Tensor::zeros([rows, kv_heads, capacity, head_dim], device);
        Self {
            layers: (0..layers).map(|_| Some((empty(), empty()))).collect(),
            kv_heads,
            head_dim,
            capacity,
            used: 0,
            visible: vec![Vec::new(); rows],
            next: vec![0; rows],
            fresh: 0,
            device: device.clone(),
        }
    }

    /// Sequences it holds.
    pub fn rows(&self) -> usize {
        self.visible.len()
    }

    /// The position of a row's next token, which is how many tokens it has kept.
    pub fn next_position(&self, row: usize) -> usize {
        self.next[row]
    }

    /// Sets the position of a row's next token, where positions do not count the tokens kept (a draft head's begin
    /// at 1).
    pub fn set_next_position(&mut self, row: usize, position: usize) {
        self.next[row] = position;
    }

    /// Forgets a row's tokens.
    pub fn clear(&mut self, row: usize) {
        self.visible[row].fill(false);
        self.next[row] = 0;
    }

    /// Puts a prompt's keys, rows `at..at + length` of `keys`, into a row in place of what it held.
    pub fn insert(&mut self, row: usize, keys: &LayerKeys, at: usize, length: usize) {
        self.clear(row);
        if length == 0 {
            return;
        }
        if length > self.used {
            self.make_room(length - self.used);
            self.grow_used(length);
        }
        let (kv, dim) = (self.kv_heads, self.head_dim);
        for (slot, (k, v)) in self.layers.iter_mut().zip(keys) {
            let (all_k, all_v) = slot.take().expect("no step is under way");
            let place = [row..row + 1, 0..kv, 0..length, 0..dim];
            let open = |x: &Tensor<2>| heads_first(x.clone().narrow(0, at, length).unsqueeze_dim(0), kv, dim);
            *slot = Some((all_k.slice_assign(place.clone(), open(k)), all_v.slice_assign(place, open(v))));
        }
        self.visible[row][..length].fill(true);
        self.next[row] = length;
    }

    fn grow_used(&mut self, used: usize) {
        self.used = used;
        for row in &mut self.visible {
            row.resize(used, false);
        }
    }

    /// Begins a step that feeds `fresh` tokens to every row.
    pub(crate) fn open(&mut self, fresh: usize, heads: usize) -> CacheStep {
        self.make_room(fresh);
        self.fresh = fresh;
        let group = heads / self.kv_heads;
        let columns = self.used + fresh;
        let mut mask = Vec::with_capacity(self.rows() * group * fresh * columns);
        for visible in &self.visible {
            for query in (0..group).flat_map(|_| 0..fresh) {
                mask.extend(visible.iter().map(|&seen| if seen { 0.0 } else { f32::NEG_INFINITY }));
                mask.extend((0..fresh).map(|new| if new <= query { 0.0 } else { f32::NEG_INFINITY }));
            }
        }
        let shape = [self.rows(), 1, group * fresh, columns];
        CacheStep {
            positions: self.next.iter().flat_map(|&next| next..next + fresh).collect(),
            heads,
            fresh,
            mask: Tensor::from_data(TensorData::new(mask, shape), &self.device),
        }
    }

    /// Writes the step's keys and values (`[rows * fresh, kv_heads * head_dim]`) into a layer and attends with its
    /// queries (`[rows * fresh, heads * head_dim]`, also the shape of the result).
    pub(crate) fn attend(
        &mut self,
        step: &CacheStep,
        layer: usize,
        q: Tensor<2>,
        k: Tensor<2>,
        v: Tensor<2>,
    ) -> Tensor<2> {
        let (rows, kv, dim, fresh) = (self.rows(), self.kv_heads, self.head_dim, step.fresh);
        let (all_k, all_v) = self.layers[layer].take().expect("no step is under way");
        let place = [0..rows, 0..kv, self.used..self.used + fresh, 0..dim];
        let open = |x: Tensor<2>| {
            let width = x.dims()[1];
            heads_first(x.reshape([rows, fresh, width]), kv, dim)
        };
        // The old tensors are moved in, so the write happens in place.
        let all_k = all_k.slice_assign(place.clone(), open(k));
        let all_v = all_v.slice_assign(place, open(v));
        let columns = self.used + fresh;
        let q = open(q * (1.0 / (dim as f64).sqrt()));
        let scores = q.matmul(all_k.clone().narrow(2, 0, columns).transpose()) + step.mask.clone();
        let attended = activation::softmax(scores, 3).matmul(all_v.clone().narrow(2, 0, columns));
        self.layers[layer] = Some((all_k, all_v));
        rows_first(attended, rows, fresh, step.heads * dim)
    }

    /// Ends a step: of the tokens fed to `row`, the first `keep[row]` stay.
    pub fn commit(&mut self, keep: &[usize]) {
        for (row, &keep) in keep.iter().enumerate() {
            self.visible[row].extend((0..self.fresh).map(|new| new < keep));
            self.next[row] += keep;
        }
        self.used += self.fresh;
        self.fresh = 0;
    }

    /// Takes back the last `count` tokens of a row.
    pub fn take_back(&mut self, row: usize, count: usize) {
        let last = (0..self.used).rev().filter(|&column| self.visible[row][column]).take(count).collect::<Vec<_>>();
        self.next[row] -= last.len();
        for column in last {
            self.visible[row][column] = false;
        }
    }

    /// Makes `more` columns free: squeezes unseen ones out where that pays, else grows.
    fn make_room(&mut self, more: usize) {
        // At least one, since a tensor cannot be empty; the mask hides it.
        let longest = self.visible.iter().map(|row| row.iter().filter(|&&seen| seen).count()).max().unwrap_or(0).max(1);
        // Every step pays for every column, so half-empty ones go even when there is room.
        let sparse = self.used > 64 && self.used > longest + longest / 4 + 32;
        if !sparse && self.used + more <= self.capacity {
            return;
        }
        let capacity = if longest + more + 16 <= self.capacity { self.capacity } else { (longest + more) * 3 / 2 + 32 };
        let (rows, kv, dim) = (self.rows(), self.kv_heads, self.head_dim);
        let seen: Vec<Vec<usize>> =
            self.visible.iter().map(|row| (0..self.used).filter(|&column| row[column]).collect()).collect();
        let mut picked = Vec::with_capacity(rows * kv * longest);
        for (row, seen) in seen.iter().enumerate() {
            for head in 0..kv {
                let first = (row * kv + head) * self.capacity;
                picked.extend(seen.iter().map(|&column| first + column));
                // Rows shorter than the longest repeat any column; the mask hides it.
                picked.extend(std::iter::repeat_n(first, longest - seen.len()));
            }
        }
        let picked = index(picked, &self.device);
        for slot in &mut self.layers {
            let (k, v) = slot.take().expect("no step is under way");
            let [k, v] = [k, v].map(|x| {
                let flat = x.reshape([rows * kv * self.capacity, dim]);
                let kept = flat.select(0, picked.clone()).reshape([rows, kv, longest, dim]);
                let empty = Tensor::zeros([rows, kv, capacity, dim], &self.device);
                empty.slice_assign([0..rows, 0..kv, 0..longest, 0..dim], kept)
            });
            *slot = Some((k, v));
        }
        for (row, seen) in self.visible.iter_mut().zip(&seen) {
            *row = (0..longest).map(|column| column < seen.len()).collect();
        }
        self.used = longest;
        self.capacity = capacity;
    }
}

/// `[batch, rows, kv * group * dim]` as `[batch, kv, group * rows, dim]`.
pub(super) fn heads_first(x: Tensor<3>, kv: usize, dim: usize) -> Tensor<4> {
    let [batch, rows, width] = x.dims();
    let group = width / (kv * dim);
    x.reshape([batch, rows, kv, group, dim]).permute([0, 2, 3, 1, 4]).reshape([batch, kv, group * rows, dim])
}

/// `[batch, kv, group * rows, dim]` as `[batch * rows, kv * group * dim]`.
pub(super) fn rows_first(x: Tensor<4>, batch: usize, rows: usize, width: usize) -> Tensor<2> {
    let [_, kv, grouped, dim] = x.dims();
    let x = x.reshape([batch, kv, grouped / rows, rows, dim]);
    x.permute([0, 3, 1, 2, 4]).reshape([batch * rows, width])
}
