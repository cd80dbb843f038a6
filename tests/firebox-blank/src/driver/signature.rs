//! The parameters of a kernel, read from CubeCL's CUDA source or from PTX that NVRTC compiled from
//! it. The driver uses them to check launches.

use std::hash::{DefaultHasher, Hash, Hasher};

/// The kind of a kernel parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// A pointer to device memory.
    Pointer,
    /// A tensor map, passed by value.
    TensorMap,
    /// Anything else, passed by value.
    Value,
}

impl Parameter {
    const fn letter(self) -> char {
        match self {
            Self::Pointer => 'p',
            Self::TensorMap => 't',
            Self::Value => 'v',
        }
    }

    const fn from_letter(letter: char) -> Option<Self> {
        match letter {
            'p' => Some(Self::Pointer),
            't' => Some(Self::TensorMap),
            'v' => Some(Self::Value),
            _ => None,
        }
    }
}

/// The name and parameters of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Name of the entry point.
    pub name: String,
    /// The parameters, in order.
    pub parameters: Vec<Parameter>,
    /// A hash of the code. Distinguishes kernels with the same name.
    pub code: u64,
}

/// The first line of every module the NVRTC stub produces.
const MARK: &str = "// blank";

/// Size of a tensor map in bytes.
const TENSOR_MAP_BYTES: usize = 128;

impl Signature {
    /// The kernel of a CUDA source written by CubeCL: one `extern "C" __global__` function.
    pub fn of_source(source: &str) -> Option<Self> {
        let declaration = &source[source.find("__global__")?..];
        let declaration = declaration.split_once("void")?.1;
        let mut rest = declaration.trim_start();
        // Attributes with arguments of their own come before the name.
        while rest.starts_with("__") {
            let open = rest.find('(')?;
            rest = rest[open + closing(&rest[open..])? + 1..].trim_start();
        }
        let open = rest.find('(')?;
        let name = rest[..open].trim().to_owned();
        let inside = &rest[open + 1..open + closing(&rest[open..])?];
        let arguments = inside.split(',').map(str::trim).filter(|argument| !argument.is_empty());
        let parameters = arguments.map(|argument| match argument {
            argument if argument.contains('*') => Parameter::Pointer,
            argument if argument.contains("CUtensorMap") => Parameter::TensorMap,
            _ => Parameter::Value,
        });
        Some(Self { name, parameters: parameters.collect(), code: hash(source) })
    }

    /// The kernels of a module, produced by the stub or given as PTX.
    pub fn of_module(image: &str) -> Vec<Self> {
        match image.strip_prefix(MARK) {
            Some(lines) => lines.lines().filter_map(Self::of_line).collect(),
            None => image.split(".entry").skip(1).filter_map(Self::of_entry).collect(),
        }
    }

    /// The module the NVRTC stub produces for this kernel.
    pub fn module(&self) -> String {
        let letters: String = self.parameters.iter().map(|parameter| parameter.letter()).collect();
        format!("{MARK}\n{} {letters} {:x}\n", self.name, self.code)
    }

    fn of_line(line: &str) -> Option<Self> {
        let (name, rest) = line.split_once(' ')?;
        let (letters, code) = rest.split_once(' ')?;
        let parameters: Option<Vec<_>> = letters.chars().map(Parameter::from_letter).collect();
        let code = u64::from_str_radix(code, 16).ok()?;
        Some(Self { name: name.to_owned(), parameters: parameters?, code })
    }

    /// Parses one PTX entry, from after `.entry`.
    fn of_entry(entry: &str) -> Option<Self> {
        let open = entry.find('(')?;
        let name = entry[..open].trim().to_owned();
        let inside = &entry[open + 1..open + closing(&entry[open..])?];
        let parameters = inside.split(',').filter(|line| line.contains(".param")).map(|line| {
            // An array is a structure by value. A single 64-bit number is an address: CubeCL passes
            // no other.
            match line.split_once('[') {
                Some((_, rest)) if rest.starts_with(&format!("{TENSOR_MAP_BYTES}]")) => {
                    // A structure may have the size of a tensor map; only its alignment differs.
                    if line.contains(".align 64") || line.contains(".align 128") {
                        Parameter::TensorMap
                    } else {
                        Parameter::Value
                    }
                }
                Some(_) => Parameter::Value,
                None if line.contains(".u64") => Parameter::Pointer,
                None => Parameter::Value,
            }
        });
        Some(Self { name, parameters: parameters.collect(), code: hash(entry) })
    }
}

/// A hash that is the same for the same text in every process.
fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// The position of the parenthesis that closes the one at the start of `text`.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::Parameter::{Pointer, TensorMap, Value};
    use super::*;

    #[track_caller]
    fn check(signature: Option<Signature>, name: &str, parameters: &[Parameter]) {
        let signature = signature.expect("it has a kernel");
        assert_eq!((signature.name.as_str(), signature.parameters.as_slice()), (name, parameters));
        let again = Signature::of_module(&signature.module());
        assert_eq!(again, [signature]);
    }

    #[test]
    fn a_kernel_of_cubecl_is_read() {
        let source = "struct info_st { uint32 static_meta[4]; };\n\nextern \"C\" __global__ void \
            __launch_bounds__(256)matmul_entry_f32 (\n    const __grid_constant__ CUtensorMap tensor_map_0, \
            const float_4* __restrict__ buffer_0, float* buffer_1, const uint32* __restrict__ dynamic_meta, \
            const __grid_constant__ info_st info\n) { if (a) { f(b); } }";
        let expected = [TensorMap, Pointer, Pointer, Pointer, Value];
        check(Signature::of_source(source), "matmul_entry_f32", &expected);
        let clusters = "extern \"C\" __global__ void __launch_bounds__(32)__cluster_dims__(2, 1, 1) k (\n    \n) {}";
        check(Signature::of_source(clusters), "k", &[]);
        assert_eq!(Signature::of_source("void f(int a) {}"), None);
        assert_eq!(Signature::of_source("__global__ void k(float* a"), None);
    }

    #[test]
    fn a_kernel_of_nvrtc_is_read() {
        let ptx = ".version 9.0\n.target sm_89\n\n.visible .entry reduce(\n\
            \t.param .align 64 .b8 reduce_param_0[128],\n\
            \t.param .u64 .ptr .align 1 reduce_param_1,\n\
            \t.param .u64 reduce_param_2,\n\
            \t.param .align 8 .b8 reduce_param_3[40]\n)\n.maxntid 256, 1, 1\n{ ret; }";
        let found = Signature::of_module(ptx);
        let [signature] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!(signature.name, "reduce");
        assert_eq!(signature.parameters, [TensorMap, Pointer, Pointer, Value]);
    }
}
