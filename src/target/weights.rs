//! A target's weights, wherever they are stored: a Hugging Face folder of safetensors, or a GGUF file.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, gguf_file};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors, tensor::Metadata};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::config::{GgufFacts, TargetConfig};
use super::tokenizer::TargetTokenizer;
use super::{HostTensor, TargetError, WeightSource};

/// An opened target: its shape known, its weights read on demand.
pub struct TargetFiles {
    /// The folder or the GGUF file.
    pub path: PathBuf,
    pub config: TargetConfig,
    store: Store,
}

enum Store {
    Folder { shards: Vec<Shard>, place: BTreeMap<String, usize> },
    Gguf { content: gguf_file::Content, architecture: String },
}

/// One mapped safetensors file.
struct Shard {
    path: PathBuf,
    map: Mmap,
    /// Where the tensors begin.
    start: usize,
    metadata: Metadata,
}

impl TargetFiles {
    /// Opens a Hugging Face folder, a GGUF file, or a folder that holds exactly one GGUF file.
    ///
    /// # Errors
    /// When nothing is there, a file is torn, or the model is not one the engine runs.
    pub fn open(path: &Path) -> Result<Self, TargetError> {
        if path.is_file() {
            return Self::open_gguf(path);
        }
        if path.join("config.json").is_file() {
            return Self::open_folder(path);
        }
        let mut found: Vec<PathBuf> = match std::fs::read_dir(path) {
            Ok(entries) => {
                entries.filter_map(|e| e.ok().map(|e| e.path())).filter(|p| has_extension(p, "gguf")).collect()
            }
            Err(_) => Vec::new(),
        };
        match (found.pop(), found.is_empty()) {
            (Some(file), true) => Self::open_gguf(&file),
            _ => Err(TargetError::NotFound { path: path.to_path_buf() }),
        }
    }

    fn open_folder(path: &Path) -> Result<Self, TargetError> {
        let config_path = path.join("config.json");
        let json = read_json(&config_path)?;
        let generation_path = path.join("generation_config.json");
        let generation = if generation_path.is_file() { Some(read_json(&generation_path)?) } else { None };
        let config = TargetConfig::from_hugging_face(&json, generation.as_ref(), &config_path)?;
        let index_path = path.join("model.safetensors.index.json");
        let names: Vec<String> = if index_path.is_file() {
            let index = read_json(&index_path)?;
            let map = index
                .get("weight_map")
                .and_then(Value::as_object)
                .ok_or_else(|| TargetError::Config { path: index_path.clone(), reason: "no `weight_map`".into() })?;
            let mut names: Vec<String> = map.values().filter_map(|v| v.as_str().map(str::to_string)).collect();
            names.sort();
            names.dedup();
            names
        } else {
            vec!["model.safetensors".into()]
        };
        let mut shards = Vec::new();
        let mut place = BTreeMap::new();
        for name in names {
            let shard = Shard::open(&path.join(&name))?;
            for tensor in shard.metadata.tensors().into_keys() {
                place.insert(tensor, shards.len());
            }
            shards.push(shard);
        }
        Ok(Self { path: path.to_path_buf(), config, store: Store::Folder { shards, place } })
    }

    fn open_gguf(path: &Path) -> Result<Self, TargetError> {
        let fail = |reason: String| TargetError::Config { path: path.to_path_buf(), reason };
        let mut file = File::open(path).map_err(TargetError::io(path))?;
        let length = file.metadata().map_err(TargetError::io(path))?.len();
        super::gguf::check_header(&mut std::io::BufReader::new(&mut file), length).map_err(&fail)?;
        file.rewind().map_err(TargetError::io(path))?;
        let content = gguf_file::Content::read(&mut std::io::BufReader::new(&mut file))
            .map_err(|e| fail(format!("not a GGUF file: {e}")))?;
        let embedding =
            content.tensor_infos.get("token_embd.weight").ok_or_else(|| fail("no `token_embd.weight`".into()))?;
        let vocab_size = embedding.shape.dims().first().copied().unwrap_or(0);
        let rope_factors = match content.tensor_infos.contains_key("rope_freqs.weight") {
            true => Some(read_gguf(&content, &mut file, "rope_freqs.weight", path, length)?.data),
            false => None,
        };
        let facts = GgufFacts {
            vocab_size,
            has_head: content.tensor_infos.contains_key("output.weight"),
            has_qkv_bias: content.tensor_infos.contains_key("blk.0.attn_q.bias"),
            has_qk_norm: content.tensor_infos.contains_key("blk.0.attn_q_norm.weight"),
            rope_factors,
        };
        let config = TargetConfig::from_gguf(&content.metadata, &facts, path)?;
        let architecture = config.model_type.clone();
        Ok(Self { path: path.to_path_buf(), config, store: Store::Gguf { content, architecture } })
    }

    /// The tokenizer and chat template that lie with the weights.
    ///
    /// # Errors
    /// When they are missing, torn or of a kind that cannot be rebuilt.
    pub fn tokenizer(&self) -> Result<TargetTokenizer, TargetError> {
        match &self.store {
            Store::Folder { .. } => TargetTokenizer::from_folder(&self.path),
            Store::Gguf { content, .. } => TargetTokenizer::from_gguf(&content.metadata, &self.path),
        }
    }

    /// A name for exactly these weights, 16 hex digits: sizes, headers and both ends of each file. States extracted
    /// from other weights carry another name.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn fingerprint(&self) -> Result<String, TargetError> {
        const END: u64 = 1 << 16;
        let paths: Vec<&Path> = match &self.store {
            Store::Folder { shards, .. } => shards.iter().map(|s| s.path.as_path()).collect(),
            Store::Gguf { .. } => vec![&self.path],
        };
        let mut hash = Sha256::new();
        for path in paths {
            let mut file = File::open(path).map_err(TargetError::io(path))?;
            let length = file.metadata().map_err(TargetError::io(path))?.len();
            hash.update(length.to_le_bytes());
            let mut buffer = Vec::new();
            (&mut file).take(END).read_to_end(&mut buffer).map_err(TargetError::io(path))?;
            file.seek(SeekFrom::Start(length.saturating_sub(END))).map_err(TargetError::io(path))?;
            file.read_to_end(&mut buffer).map_err(TargetError::io(path))?;
            hash.update(&buffer);
        }
        Ok(hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect())
    }
}

impl WeightSource for TargetFiles {
    fn tensor(&self, name: &str) -> Result<HostTensor, TargetError> {
        let missing =
            || TargetError::Tensor { path: self.path.clone(), name: name.into(), reason: "is not there".into() };
        match &self.store {
            Store::Folder { shards, place } => shards[*place.get(name).ok_or_else(missing)?].tensor(name),
            Store::Gguf { content, architecture } => {
                let stored = super::gguf::stored_name(name).ok_or_else(missing)?;
                let mut file = File::open(&self.path).map_err(TargetError::io(&self.path))?;
                let length = file.metadata().map_err(TargetError::io(&self.path))?.len();
                let tensor = read_gguf(content, &mut file, &stored, &self.path, length)?;
                // llama.cpp's converter interleaves the two halves of each q and k head of the llama architecture.
                let heads = match (architecture.as_str(), name) {
                    ("llama", n) if n.contains("self_attn.q_proj") => Some(self.config.num_attention_heads),
                    ("llama", n) if n.contains("self_attn.k_proj") => Some(self.config.num_key_value_heads),
                    _ => None,
                };
                match heads {
                    Some(heads) if tensor.shape[0].is_multiple_of(2 * heads) => {
                        Ok(super::gguf::uninterleave(tensor, heads))
                    }
                    _ => Ok(tensor),
                }
            }
        }
    }

    fn contains(&self, name: &str) -> bool {
        match &self.store {
            Store::Folder { place, .. } => place.contains_key(name),
            Store::Gguf { content, .. } => {
                super::gguf::stored_name(name).is_some_and(|stored| content.tensor_infos.contains_key(&stored))
            }
        }
    }
}

impl Shard {
    fn open(path: &Path) -> Result<Self, TargetError> {
        let fail = |reason: String| TargetError::Config { path: path.to_path_buf(), reason };
        let file = File::open(path).map_err(TargetError::io(path))?;
        // SAFETY: the map is read only; a file truncated under us is the caller's doing, as with every mapped file.
        let map = unsafe { Mmap::map(&file) }.map_err(TargetError::io(path))?;
        let (header, metadata) =
            SafeTensors::read_metadata(&map).map_err(|e| fail(format!("torn safetensors: {e}")))?;
        let start = header + 8;
        let end = metadata.tensors().values().map(|t| t.data_offsets.1).max().unwrap_or(0);
        if map.len() < start + end {
            return Err(fail(format!(
                "torn: {} bytes of tensors, {} announced",
                map.len() - start.min(map.len()),
                end
            )));
        }
        Ok(Self { path: path.to_path_buf(), map, start, metadata })
    }

    fn tensor(&self, name: &str) -> Result<HostTensor, TargetError> {
        let fail = |reason: String| TargetError::Tensor { path: self.path.clone(), name: name.into(), reason };
        let info = self.metadata.info(name).ok_or_else(|| fail("is not there".into()))?;
        let (from, to) = info.data_offsets;
        let bytes = &self.map[self.start + from..self.start + to];
        let data = floats(info.dtype, bytes)
            .ok_or_else(|| fail(format!("has type {:?}, not a float the engine reads", info.dtype)))?;
        Ok(HostTensor { shape: info.shape.clone(), data })
    }
}

/// Little-endian F32, F16 or BF16 as float32; `None` for other types.
pub fn floats(dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    let halves = |to: fn([u8; 2]) -> f32| bytes.chunks_exact(2).map(|b| to([b[0], b[1]])).collect();
    match dtype {
        Dtype::F32 => Some(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()),
        Dtype::F16 => Some(halves(|b| half::f16::from_le_bytes(b).to_f32())),
        Dtype::BF16 => Some(halves(|b| half::bf16::from_le_bytes(b).to_f32())),
        _ => None,
    }
}

fn read_gguf(
    content: &gguf_file::Content,
    file: &mut File,
    name: &str,
    path: &Path,
    length: u64,
) -> Result<HostTensor, TargetError> {
    let fail = |reason: String| TargetError::Tensor { path: path.to_path_buf(), name: name.into(), reason };
    let info = content.tensor_infos.get(name).ok_or_else(|| fail("is not there".into()))?;
    use GgmlDType::{BF16, F16, F32, Q4_0, Q4_1, Q4K, Q6K, Q8_0};
    if !matches!(info.ggml_dtype, F32 | F16 | BF16 | Q8_0 | Q4_0 | Q4_1 | Q4K | Q6K) {
        let what = format!("tensor `{name}` in {:?}", info.ggml_dtype);
        return Err(TargetError::Unsupported { path: path.to_path_buf(), what });
    }
    let shape = info.shape.dims().to_vec();
    let blocks = info.shape.elem_count() / info.ggml_dtype.block_size();
    let size = (blocks as u64).saturating_mul(info.ggml_dtype.type_size() as u64);
    if content.tensor_data_offset.saturating_add(info.offset).saturating_add(size) > length {
        return Err(fail("is torn: it ends behind the end of the file".into()));
    }
    let device = candle_core::Device::Cpu;
    let mut read = || -> candle_core::Result<Vec<f32>> {
        content.tensor(file, name, &device)?.dequantize(&device)?.flatten_all()?.to_vec1()
    };
    Ok(HostTensor { shape, data: read().map_err(|e| fail(e.to_string()))? })
}

pub(super) fn read_json(path: &Path) -> Result<Value, TargetError> {
    let text = std::fs::read_to_string(path).map_err(TargetError::io(path))?;
    serde_json::from_str(&text)
        .map_err(|e| TargetError::Config { path: path.to_path_buf(), reason: format!("not JSON: {e}") })
}

pub(super) fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|e| e == extension)
}

/// Weights in memory, for models made in a test or a bench.
impl WeightSource for HashMap<String, HostTensor> {
    fn tensor(&self, name: &str) -> Result<HostTensor, TargetError> {
        self.get(name).cloned().ok_or_else(|| TargetError::Tensor {
            path: "memory".into(),
            name: name.into(),
            reason: "is not there".into(),
        })
    }

    fn contains(&self, name: &str) -> bool {
        self.contains_key(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::quantized::QTensor;
    use candle_core::{Device, Tensor};
    use gguf_file::Value::{F32 as Float, String as Text, U32};

    /// A GGUF file of one layer, every matrix stored as `dtype`.
    fn write_gguf(path: &Path, dtype: GgmlDType) {
        let matrix = |rows: usize, columns: usize| -> Tensor {
            let data: Vec<f32> = (0..rows * columns).map(|i| ((i * 7919 % 997) as f32 - 498.0) / 500.0).collect();
            Tensor::from_vec(data, (rows, columns), &Device::Cpu).unwrap()
        };
        let stored = |tensor: &Tensor, dtype| QTensor::quantize(tensor, dtype).unwrap();
        let gain = stored(&Tensor::ones(256, candle_core::DType::F32, &Device::Cpu).unwrap(), GgmlDType::F32);
        let mut tensors = vec![("token_embd.weight", stored(&matrix(16, 256), dtype))];
        for (name, rows, columns) in [
            ("blk.0.attn_q.weight", 256, 256),
            ("blk.0.attn_k.weight", 128, 256),
            ("blk.0.attn_v.weight", 128, 256),
            ("blk.0.attn_output.weight", 256, 256),
            ("blk.0.ffn_gate.weight", 512, 256),
            ("blk.0.ffn_up.weight", 512, 256),
            ("blk.0.ffn_down.weight", 256, 512),
        ] {
            tensors.push((name, stored(&matrix(rows, columns), dtype)));
        }
        let mut all: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
        all.extend(["output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"].map(|name| (name, &gain)));
        let metadata = [
            ("general.architecture", Text("llama".into())),
            ("llama.block_count", U32(1)),
            ("llama.context_length", U32(64)),
            ("llama.embedding_length", U32(256)),
            ("llama.feed_forward_length", U32(512)),
            ("llama.attention.head_count", U32(4)),
            ("llama.attention.head_count_kv", U32(2)),
            ("llama.attention.layer_norm_rms_epsilon", Float(1e-5)),
            ("tokenizer.ggml.eos_token_id", U32(3)),
        ];
        let metadata: Vec<(&str, &gguf_file::Value)> = metadata.iter().map(|(key, value)| (*key, value)).collect();
        gguf_file::write(&mut File::create(path).unwrap(), &metadata, &all).unwrap();
    }

    #[test]
    fn every_gguf_type_is_read_in_rotate_half_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        write_gguf(&path, GgmlDType::F32);
        let exact = TargetFiles::open(&path).unwrap();
        assert_eq!((exact.config.rms_norm_eps, exact.config.tie_word_embeddings), (1e-5, true));
        assert_eq!(exact.config.eos_token_ids, [3]);
        let q = exact.tensor("model.layers.0.self_attn.q_proj.weight").unwrap();
        let v = exact.tensor("model.layers.0.self_attn.v_proj.weight").unwrap();
        // Row 1 of a head is its second pair's first half: stored row 2. Only q and k are turned.
        let stored = |row: usize| ((row * 256 * 7919 % 997) as f32 - 498.0) / 500.0;
        assert_eq!((q.data[256], v.data[256]), (stored(2), stored(1)));
        use GgmlDType::{BF16, F16, Q4_0, Q4_1, Q4K, Q6K, Q8_0};
        for (dtype, within) in
            [(F16, 0.001), (BF16, 0.01), (Q8_0, 0.01), (Q4_0, 0.15), (Q4_1, 0.1), (Q4K, 0.1), (Q6K, 0.05)]
        {
            write_gguf(&path, dtype);
            let files = TargetFiles::open(&path).unwrap();
            let found = files.tensor("model.layers.0.self_attn.q_proj.weight").unwrap();
            let off = found.data.iter().zip(&q.data).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off < within, "{dtype:?} is off by {off}");
            assert_eq!(found.shape, q.shape);
        }
        write_gguf(&path, GgmlDType::Q5_0);
        let files = TargetFiles::open(&path).unwrap();
        assert!(matches!(files.tensor("model.embed_tokens.weight"), Err(TargetError::Unsupported { .. })));
    }

    #[test]
    fn torn_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        write_gguf(&path, GgmlDType::F32);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 50]).unwrap();
        let files = TargetFiles::open(&path).unwrap();
        let names =
            ["model.norm.weight", "model.layers.0.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"];
        let extra = ["model.layers.0.post_attention_layernorm.weight", "model.layers.0.mlp.up_proj.weight"];
        let errors = names.iter().chain(&extra).filter(|name| files.tensor(name).is_err()).count();
        assert_eq!(errors, 1, "one tensor lies at the end");
        std::fs::write(&path, &bytes[..300]).unwrap();
        assert!(matches!(TargetFiles::open(&path), Err(TargetError::Config { .. })));
        assert!(matches!(TargetFiles::open(folder.path().join("no").as_path()), Err(TargetError::NotFound { .. })));
    }
}
