use std::collections::BTreeMap;
pub type HeadTensors = BTreeMap<String, HostArray>;
#[derive(Debug, Clone, PartialEq)] pub struct HostArray { pub shape: Vec<usize>, pub data: Vec<f32> }
