//! Cards: what must be known about a GPU to find a footprint on it without having it.
//!
//! `card/table.rs` lists known cards. A card's properties make a dry device, which `device.rs`
//! lends.

mod table;

use std::fmt;

use cubecl::features::{AtomicUsage, Features, Plane, Tma, TypeUsage};
use cubecl::ir::{
    BarrierLevel, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties, OpaqueType, SemanticType, StorageType, Type, VectorSize,
};
use cubecl_common::profile::TimingMethod;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::CudaWmmaCompiler;
use cubecl_cpp::shared::{
    register_mma_features, register_scaled_mma_features, register_wmma_features,
};
use cubecl_cpp::{DialectWmmaCompiler, register_supported_types};
use firebox_trace::Bytes;

/// The compute capability of an NVIDIA GPU.
///
/// ```
/// use firebox_dry::Capability;
/// assert_eq!(Capability::new(8, 9).to_string(), "8.9");
/// assert!(Capability::new(8, 9) < Capability::new(12, 0));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Capability {
    /// The generation.
    pub major: u32,
    /// The variant.
    pub minor: u32,
}

impl Capability {
    /// Capability `major.minor`.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// The number that cubecl-cuda compares, such as 89.
    const fn version(self) -> u32 {
        self.major * 10 + self.minor
    }

    /// The maximum shared memory of one block (opt-in).
    ///
    /// From the table "Technical Specifications per Compute Capability" of NVIDIA's CUDA C++
    /// Programming Guide. Capabilities not in the table get the 99 KiB of consumer cards.
    pub const fn shared_memory(self) -> Bytes {
        match self.version() {
            50..=62 => Bytes::kib(48),
            70 | 72 => Bytes::kib(96),
            75 => Bytes::kib(64),
            80 | 87 => Bytes::kib(163),
            90 | 100 | 103 | 110 => Bytes::kib(227),
            _ => Bytes::kib(99),
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// An NVIDIA GPU, as cubecl-cuda sees it.
///
/// ```
/// use firebox_dry::{Capability, Card};
/// use firebox_trace::Bytes;
/// let card = Card::named("rtx 4090").expect("in the table");
/// assert_eq!(card.capability(), Capability::new(8, 9));
/// assert!(card.largest_buffer() < Bytes::gib(6));
///
/// let other = Card::new("RTX A6000", Bytes::mib(48_670), Capability::new(8, 6), 84);
/// assert_eq!(other.shared_memory(), Bytes::kib(99));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    name: &'static str,
    memory: Bytes,
    capability: Capability,
    multiprocessors: u32,
    throughput: Option<Throughput>,
}

/// What a card computes and moves at most in a second, as published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Throughput {
    /// Floating-point operations in 32 bit, without tensor cores, in 10⁹.
    pub gflops: u32,
    /// Bytes between the memory and the processor, in 10⁹.
    pub gigabytes: u32,
}

impl Card {
    /// A card that is not in the table.
    ///
    /// `memory` is what `cuDeviceTotalMem` returns, which is a few per cent below the number on the
    /// box. The largest page is a quarter of it, and the pools follow from that.
    pub const fn new(
        name: &'static str,
        memory: Bytes,
        capability: Capability,
        multiprocessors: u32,
    ) -> Self {
        Self { name, memory, capability, multiprocessors, throughput: None }
    }

    /// The same card with this throughput.
    pub const fn with_throughput(mut self, throughput: Throughput) -> Self {
        self.throughput = Some(throughput);
        self
    }

    /// The card of the table that a driver calls `name`, such as `NVIDIA A100-SXM4-80GB`.
    ///
    /// A variant with a name of its own, such as an RTX 4070 Ti, is another card. One with another
    /// connector is not.
    ///
    /// ```
    /// use firebox_dry::Card;
    /// let name = |driver| Card::of_driver(driver).map(|card| card.name().to_owned());
    /// assert_eq!(name("NVIDIA GeForce RTX 4090").as_deref(), Some("RTX 4090"));
    /// assert_eq!(name("NVIDIA A100-SXM4-80GB").as_deref(), Some("A100 80GB"));
    /// assert_eq!(name("NVIDIA GeForce RTX 4070 Ti"), None);
    /// ```
    pub fn of_driver(name: &str) -> Option<&'static Self> {
        const MAKERS: [&str; 8] =
            ["nvidia", "geforce", "tesla", "pcie", "sxm4", "sxm5", "hbm3", "hbm3e"];
        let words = |name: &str| -> (Vec<String>, Vec<String>) {
            let lower = name.to_lowercase();
            let words = lower.split([' ', '-']).filter(|word| !MAKERS.contains(word));
            words.map(str::to_owned).partition(|word| !word.ends_with("gb"))
        };
        let (model, memory) = words(name);
        let same = || Self::all().iter().filter(|card| words(card.name).0 == model);
        let same_memory = same().find(|card| words(card.name).1 == memory);
        same_memory.or_else(|| same().next())
    }

    /// The card of the table with this name, or else the first whose name contains all words of
    /// `name`. Case is ignored.
    pub fn named(name: &str) -> Option<Self> {
        let name = name.to_lowercase();
        if let Some(card) = Self::all().iter().find(|card| card.name.to_lowercase() == name) {
            return Some(card.clone());
        }
        let words = || name.split_whitespace();
        let matches = |card: &&Self| {
            let full = card.name.to_lowercase();
            words().next().is_some() && words().all(|word| full.contains(word))
        };
        Self::all().iter().find(matches).cloned()
    }

    /// The cards of the table.
    pub fn all() -> &'static [Self] {
        &table::CARDS
    }

    /// The name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The memory that the driver reports, including contexts and everything else.
    pub fn memory(&self) -> Bytes {
        self.memory
    }

    /// The compute capability.
    pub fn capability(&self) -> Capability {
        self.capability
    }

    /// What it computes and moves at most in a second, if that is known.
    pub fn throughput(&self) -> Option<Throughput> {
        self.throughput
    }

    /// The number of streaming multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// The maximum shared memory of one block (opt-in).
    pub fn shared_memory(&self) -> Bytes {
        self.capability.shared_memory()
    }

    /// The tensor cores of one multiprocessor according to cubecl-cuda, or `None` if it does not
    /// know.
    ///
    /// Mirrors `tensor_cores_per_sm` in `runtime.rs` of cubecl-cuda, which has no entry for
    /// capability 12.0.
    pub fn tensor_cores(&self) -> Option<u32> {
        match self.capability.version() {
            70 | 75 => Some(8),
            80 | 86 | 89 | 90 | 91 | 92 | 100 => Some(4),
            _ => None,
        }
    }

    /// What the driver takes for a process's context, kernels included. A rough number, 600 MiB for
    /// every card: it depends on the driver, and grows with the multiprocessors and the loaded
    /// kernels.
    pub fn context(&self) -> Bytes {
        CONTEXT
    }

    /// The largest buffer that cubecl-cuda can hold on this card: a quarter of its memory.
    pub fn largest_buffer(&self) -> Bytes {
        let page = self.memory.get() / 4;
        Bytes::new(page / CUDA_ALIGNMENT * CUDA_ALIGNMENT)
    }

    /// What cubecl-cuda would report about this card.
    ///
    /// Mirrors `DeviceService::init` in `runtime.rs` of cubecl-cuda, with CUDA 12.8 or later.
    pub fn properties(&self) -> DeviceProperties {
        let arch = CudaArchitecture { version: self.capability.version() };
        let wmma = CudaWmmaCompiler::supported_wmma_combinations(&arch);
        let mma = CudaWmmaCompiler::supported_mma_combinations(&arch);
        let scaled_mma = CudaWmmaCompiler::supported_scaled_mma_combinations(&arch);
        let memory = MemoryDeviceProperties {
            max_page_size: self.memory.get() / 4,
            alignment: CUDA_ALIGNMENT,
        };
        let hardware = HardwareProperties {
            load_width: 128,
            plane_size_min: 32,
            plane_size_max: 32,
            max_bindings: 1024,
            max_shared_memory_size: self.shared_memory().get() as usize,
            max_cube_count: (i32::MAX as u32, 65_535, 65_535),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 64),
            num_streaming_multiprocessors: Some(self.multiprocessors),
            num_tensor_cores: self.tensor_cores(),
            min_tensor_cores_dim: (!wmma.is_empty()).then_some(8),
            num_cpu_cores: None,
            max_vector_size: VectorSize::MAX,
        };
        let features = Features::default();
        let mut properties =
            DeviceProperties::new(features, memory, hardware, TimingMethod::System);
        register_features(&mut properties, self.capability);
        register_wmma_features(wmma, &mut properties);
        register_mma_features(mma, &mut properties);
        register_scaled_mma_features(scaled_mma, &mut properties);
        properties
    }
}

/// `mem_alignment` in `runtime.rs` of cubecl-cuda.
const CUDA_ALIGNMENT: u64 = 512;

/// The size of a context. No table of contexts by card and driver was found. Users measured 107 MiB
/// on an RTX 4060 Ti and 555 MiB on an RTX PRO 6000 for the context alone, about 3 MiB a
/// multiprocessor (ggml-org/llama.cpp#23604). A PyTorch process, which loads kernels when they are
/// used, had some 300 MiB (pytorch/pytorch#107667). Kernels that burn compiles are added to that.
const CONTEXT: Bytes = Bytes::mib(600);

fn register_features(properties: &mut DeviceProperties, capability: Capability) {
    let version = capability.version();
    register_supported_types(properties);
    properties.register_type_usage(ElemType::Float(FloatKind::TF32), TypeUsage::Conversion);
    register_atomics(properties, version);
    let f16 = StorageType::from(ElemType::Float(FloatKind::F16));
    let bf16 = StorageType::from(ElemType::Float(FloatKind::BF16));
    if version >= 70 {
        properties.register_semantic_type(SemanticType::Pipeline);
        for level in [BarrierLevel::Unit, BarrierLevel::Cube] {
            properties.register_type_usage(OpaqueType::Barrier(level), TypeUsage::Buffer);
        }
        properties.features.plane.insert(Plane::Sync);
    }
    if version >= 75 {
        properties.features.matmul.ldmatrix.extend([f16, bf16]);
    }
    if version >= 80 {
        properties.features.copy_async = true;
    }
    if version >= 89 {
        for float in [FloatKind::E4M3, FloatKind::E5M2] {
            let usage = TypeUsage::Conversion | TypeUsage::Buffer;
            properties.register_type_usage(ElemType::Float(float), usage);
        }
    }
    if version >= 90 {
        properties.features.tma.insert(Tma::Base);
        properties.register_semantic_type(SemanticType::TensorMap);
        properties.features.cube_cluster = true;
        properties.features.matmul.stmatrix.extend([f16, bf16]);
    }
    if version >= 100 {
        properties.features.tma.insert(Tma::Im2colWide);
    }
    if (10..=12).contains(&capability.major) {
        register_small_floats(properties);
        properties.features.tma.insert(Tma::SwizzleAtomicity);
    }
    properties.features.memory_reinterpret = true;
    properties.features.alignment = true;
    properties.features.plane.insert(Plane::Ops);
    properties.features.plane.insert(Plane::NonUniformControlFlow);
}

fn register_atomics(properties: &mut DeviceProperties, version: u32) {
    let atomic = |float| Type::new(StorageType::Atomic(ElemType::Float(float)));
    let usage = AtomicUsage::Add | AtomicUsage::LoadStore;
    let mut register = |ty| properties.register_atomic_type_usage(ty, usage);
    if version >= 60 {
        register(atomic(FloatKind::F64));
    }
    if version >= 70 {
        register(atomic(FloatKind::F16));
        register(atomic(FloatKind::F16).with_vector_size(2));
    }
    if version >= 90 {
        register(atomic(FloatKind::F32).with_vector_size(2));
        register(atomic(FloatKind::F32).with_vector_size(4));
    }
}

fn register_small_floats(properties: &mut DeviceProperties) {
    let stored = TypeUsage::Conversion | TypeUsage::Buffer;
    let e2m1 = ElemType::Float(FloatKind::E2M1);
    properties.register_type_usage(e2m1, TypeUsage::Conversion);
    properties.register_type_usage(StorageType::Packed(e2m1, 2), stored);
    for float in [FloatKind::E2M3, FloatKind::E3M2, FloatKind::UE8M0] {
        properties.register_type_usage(ElemType::Float(float), stored);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn properties(major: u32, minor: u32) -> DeviceProperties {
        Card::new("test", Bytes::gib(24), Capability::new(major, minor), 80).properties()
    }

    #[test]
    fn features_follow_the_capability() {
        let (pascal, turing, ampere) = (properties(6, 1), properties(7, 5), properties(8, 6));
        let (ada, hopper, blackwell) = (properties(8, 9), properties(9, 0), properties(12, 0));
        // For each feature: the last capability without it, the first with it, and the check.
        type Feature = fn(&DeviceProperties) -> bool;
        let features: [(&DeviceProperties, &DeviceProperties, Feature); 9] = [
            (&pascal, &turing, |p| p.features.plane.contains(Plane::Sync)),
            (&pascal, &turing, |p| !p.features.matmul.cmma.is_empty()),
            (&pascal, &turing, |p| !p.features.matmul.ldmatrix.is_empty()),
            (&turing, &ampere, |p| p.features.copy_async),
            (&ampere, &ada, |p| p.supports_type(ElemType::Float(FloatKind::E4M3))),
            (&ada, &hopper, |p| p.features.tma.contains(Tma::Base)),
            (&ada, &hopper, |p| p.features.cube_cluster),
            (&hopper, &blackwell, |p| p.features.tma.contains(Tma::Im2colWide)),
            (&hopper, &blackwell, |p| p.supports_type(ElemType::Float(FloatKind::E2M1))),
        ];
        for (index, (without, with, feature)) in features.into_iter().enumerate() {
            assert!(!feature(without), "feature {index} comes too early");
            assert!(feature(with), "feature {index} is missing");
        }
    }

    #[test]
    fn the_largest_buffer_is_an_aligned_quarter_of_the_card() {
        let card = Card::new("odd", Bytes::new(10_000_000_001), Capability::new(8, 6), 80);
        assert_eq!(card.properties().memory.max_page_size, 2_500_000_000);
        assert_eq!(card.largest_buffer(), Bytes::new(2_500_000_000 / 512 * 512));
    }
}
