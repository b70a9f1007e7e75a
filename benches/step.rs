//! Speed of the two loops that a run spends its time in, beside the floor that products alone would take.
//!
//!     cargo bench
//!
//! The floor is measured here, as the rate of one large product: FLOPs of a step over that rate is the least time it
//! can take. Figures are for reading on a quiet machine, never asserted.

use burn::tensor::{Device, Distribution, Tensor};
use divan::Bencher;
use divan::counter::ItemsCount;
use eaglet::draft::config::DraftConfig;
use eaglet::draft::head::DraftHead;
use eaglet::draft::ttt::{Document, Layout, Objective, Teacher, step};
use eaglet::recipe::{DraftInit, LossKind};
use eaglet::target::rope::RopeTable;
use eaglet::target::{Rope, RopeScaling};
use eaglet::train::init::{Lent, new_head};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    divan::main();
}

const HIDDEN: usize = 576;
const DRAFT_VOCAB: usize = 8192;
const VOCAB: usize = 16384;

/// SmolLM2's shape.
fn config() -> DraftConfig {
    DraftConfig {
        hidden_size: HIDDEN,
        target_hidden_size: HIDDEN,
        intermediate_size: 1536,
        num_attention_heads: 9,
        num_key_value_heads: 3,
        head_dim: 64,
        rope: Rope { theta: 100_000.0, scaling: RopeScaling::None },
        vocab_size: VOCAB,
        draft_vocab_size: DRAFT_VOCAB,
        aux_layers: vec![2, 15, 27],
        ..DraftConfig::default()
    }
}

fn noise(rows: usize, columns: usize, device: &Device) -> Tensor<2> {
    Tensor::random([rows, columns], Distribution::Normal(0.0, 1.0), device)
}

fn documents(count: usize, length: usize) -> Vec<Document> {
    let states = |width: usize| (0..length * width).map(|i| ((i * 7919 % 1013) as f32 - 506.0) / 300.0).collect();
    (0..count)
        .map(|d| Document {
            ids: (0..length).map(|t| ((d * 31 + t * 17) % VOCAB) as u32).collect(),
            loss_mask: (0..length).map(|t| t >= 40).collect(),
            aux: states(3 * HIDDEN),
            last: states(HIDDEN),
        })
        .collect()
}

/// One TTT step, forward and backward, on two packed documents of 512 tokens.
#[divan::bench(args = [1, 3, 7], sample_count = 5, sample_size = 1)]
fn ttt_step(bencher: Bencher, steps: usize) {
    let device = Device::flex();
    let lent = Lent { head_rows: &vec![0.01; DRAFT_VOCAB * HIDDEN], norm: &vec![1.0; HIDDEN], layer: None };
    let tensors = new_head(&config(), DraftInit::Random, &lent, 1);
    let head = DraftHead::from_tensors(config(), &tensors, &device).expect("a whole head");
    let teacher = Teacher {
        embeddings: noise(VOCAB, HIDDEN, &device),
        norm: Tensor::ones([1, HIDDEN], &device),
        rms_norm_eps: 1e-5,
        head_rows: noise(DRAFT_VOCAB, HIDDEN, &device) * 0.02,
    };
    let rope = RopeTable::new(&config().rope, 64, 1024, &device);
    let documents = documents(2, 512);
    let views: Vec<_> = documents.iter().map(|d| (&d.ids[..], &d.loss_mask[..])).collect();
    let counts = Layout::new(&views, steps).counts();
    let trained: Vec<String> = head.weights().keys().cloned().collect();
    let objective = Objective { loss: LossKind::KlDiv, steps, decay: 0.8 };
    bencher
        .counter(ItemsCount::new(1024usize))
        .bench_local(|| step(&head, &teacher, &rope, &documents, objective, &counts, &trained).loss);
}

/// `[1024, 576] x [576, 8192]`, 9.7 GFLOP: the rate that the floor is computed with.
#[divan::bench(sample_count = 20, sample_size = 1)]
fn product_floor(bencher: Bencher) {
    let device = Device::flex();
    let (a, b) = (noise(1024, HIDDEN, &device), noise(HIDDEN, DRAFT_VOCAB, &device));
    bencher
        .counter(ItemsCount::new(2 * 1024 * HIDDEN * DRAFT_VOCAB))
        .bench_local(|| a.clone().matmul(b.clone()).into_data());
}

/// Reading a document's states from disk, as training does each step.
#[divan::bench(sample_count = 20)]
fn states_from_disk(bencher: Bencher) {
    use eaglet::features::file::{States, read, write};
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("a.safetensors");
    let data = (0..512 * 4 * HIDDEN).map(|i| (i % 1013) as f32).collect();
    let states = States { token_ids: vec![1; 512], slots: 4, hidden: HIDDEN, data };
    write(&path, &states, safetensors::Dtype::BF16).expect("a writable folder");
    bencher.counter(ItemsCount::new(512usize)).bench_local(|| read(&path).expect("a whole file").data.len());
}
