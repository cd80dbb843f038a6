//! Checks the decorator's list of methods against burn's own sources.
//!
//! A method added by burn must not silently use a decomposition that the backend does not use.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folder of this package in the checkout that runs. Another checkout that shares its build outputs
/// may have built this binary.
fn folder() -> PathBuf {
    PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo names it")).join("..")
}

/// Folders of burn's packages, by name.
fn burn() -> BTreeMap<String, PathBuf> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(folder())
        .output()
        .expect("cargo runs");
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("cargo metadata prints json");
    let packages = metadata["packages"].as_array().expect("packages");
    let packages = packages.iter().filter_map(|package| {
        let name = package["name"].as_str().filter(|name| name.starts_with("burn-"))?;
        let manifest = Path::new(package["manifest_path"].as_str()?);
        Some((name.to_owned(), manifest.parent()?.to_owned()))
    });
    packages.collect()
}

/// Folder of the sources of burn's backend traits.
fn burn_traits(burn: &BTreeMap<String, PathBuf>) -> PathBuf {
    burn.get("burn-backend").expect("it is a dependency").join("src/backend/ops")
}

/// Names of the functions that a source declares.
fn functions(source: &str) -> BTreeSet<String> {
    let declared = source.lines().filter_map(|line| {
        let line = line.trim_start();
        let line = line.strip_prefix("async ").unwrap_or(line);
        let rest = line.strip_prefix("fn ")?;
        Some(rest[..rest.find(['(', '<'])?].to_owned())
    });
    declared.collect()
}

/// Methods of one trait in a source.
fn methods(source: &str, name: &str) -> BTreeSet<String> {
    let start = source.find(&format!("pub trait {name}")).expect("the trait is there");
    let end = source[start..].find("\n}").expect("it ends") + start;
    functions(&source[start..end])
}

/// The methods on quantized tensors that some backend has of its own. What no backend has, burn
/// composes of these, and on the decorator it composes the same.
fn quantized_of_backends(burn: &BTreeMap<String, PathBuf>) -> BTreeSet<String> {
    let sources = burn.values().map(|folder| folder.join("src/ops/qtensor.rs"));
    let sources = sources.filter_map(|path| std::fs::read_to_string(path).ok());
    sources.flat_map(|source| functions(&source)).collect()
}

#[test]
fn every_method_of_burns_backend_traits_is_passed_on() {
    let packages = burn();
    let burn = burn_traits(&packages);
    let own = folder().join("crates/firebox-lazy/src/ops");
    let traits = [
        ("tensor.rs", "FloatTensorOps", "float.rs"),
        ("int_tensor.rs", "IntTensorOps", "int.rs"),
        ("bool_tensor.rs", "BoolTensorOps", "bool.rs"),
        ("activation.rs", "ActivationOps", "activation.rs"),
        ("modules/base.rs", "ModuleOps", "module.rs"),
        ("qtensor.rs", "QTensorOps", "quantized.rs"),
        ("transaction.rs", "TransactionOps", "transaction.rs"),
    ];
    let mut missing = Vec::new();
    let mut found = 0;
    for (theirs, name, ours) in traits {
        let theirs = std::fs::read_to_string(burn.join(theirs)).expect("burn's source is readable");
        let source = std::fs::read_to_string(own.join(ours)).expect("our source is readable");
        let mut passed_on = functions(&source);
        // `into_data!` takes the name of its method as an argument.
        for line in source.lines().filter_map(|line| line.trim().strip_prefix("into_data!(")) {
            passed_on.insert(line[..line.find(',').expect("two arguments")].to_owned());
        }
        let mut wanted = methods(&theirs, name);
        if name == "QTensorOps" {
            let of_backends = quantized_of_backends(&packages);
            wanted.retain(|method| of_backends.contains(method));
            assert!(wanted.contains("q_from_data"), "sources of a backend were found");
        }
        found += wanted.len();
        missing.extend(wanted.difference(&passed_on).map(|method| format!("{name}::{method}")));
    }
    assert!(found > 350, "the traits were found, with {found} methods");
    assert_eq!(missing, Vec::<String>::new(), "methods that fall back to burn's defaults");
}

/// A method on floats that has no rule would compute in another type than the rest. What burn
/// composes of methods on quantized tensors is composed of those with rules.
#[test]
fn every_method_of_burns_backend_traits_has_a_rule_in_16_bit() {
    let burn = burn_traits(&burn());
    let own = folder().join("crates/firebox-lazy/src");
    let read = |path: &str| std::fs::read_to_string(own.join(path)).expect("it is readable");
    // The lists that both decorators use.
    let list = |path: &str| {
        let source = read(path);
        let list = source.split("macro_rules!").nth(1).expect("there is a list");
        list.split("pub(crate) use").next().unwrap_or_default().to_owned()
    };
    let rest = [read("half/rest.rs"), list("ops/int.rs"), list("ops/bool.rs")].concat();
    let float = [read("half/float.rs"), list("ops/float.rs")].concat();
    let module = read("half/module.rs");
    let traits = [
        ("tensor.rs", "FloatTensorOps", &float),
        ("activation.rs", "ActivationOps", &module),
        ("modules/base.rs", "ModuleOps", &module),
        ("int_tensor.rs", "IntTensorOps", &rest),
        ("bool_tensor.rs", "BoolTensorOps", &rest),
        ("transaction.rs", "TransactionOps", &rest),
    ];
    let mut missing = Vec::new();
    for (theirs, name, source) in traits {
        let theirs = std::fs::read_to_string(burn.join(theirs)).expect("burn's source is readable");
        let mut ruled = functions(source);
        // `layer!` takes the names of its methods as arguments.
        let layers = source.lines().filter(|line| line.trim().starts_with("layer!("));
        let names = layers.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'));
        ruled.extend(names.map(str::to_owned));
        let wanted = methods(&theirs, name);
        missing.extend(wanted.difference(&ruled).map(|method| format!("{name}::{method}")));
    }
    assert_eq!(missing, Vec::<String>::new(), "methods without a rule");
}
