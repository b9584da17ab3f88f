"""BibTeX entries of the papers behind the losses and the maps, for model cards."""

from __future__ import annotations

_NEURIPS = "Advances in Neural Information Processing Systems"
_CVPR = "IEEE/CVF Conference on Computer Vision and Pattern Recognition"
_ICML = "International Conference on Machine Learning"


def _entry(kind: str, key: str, **fields: str) -> str:
    lines = [f"  {name} = {{{value}}}" for name, value in fields.items()]
    return f"@{kind}{{{key},\n" + ",\n".join(lines) + "\n}"


# By citation key.
ENTRIES: dict[str, str] = {
    "berta2025structured": _entry(
        "misc",
        "berta2025structured",
        title="Structured Matrix Scaling for Multi-Class Calibration",
        author=r"Berta, Eug{\`e}ne and Holzm{\"u}ller, David and Jordan, Michael I. and Bach, Francis",
        year="2025",
        eprint="2511.03685",
        archivePrefix="arXiv",
    ),
    "bohdal2021meta": _entry(
        "misc",
        "bohdal2021meta",
        title="Meta-Calibration: Learning of Model Calibration Using Differentiable Expected Calibration Error",
        author="Bohdal, Ondrej and Yang, Yongxin and Hospedales, Timothy",
        year="2021",
        eprint="2106.09613",
        archivePrefix="arXiv",
    ),
    "brier1950verification": _entry(
        "article",
        "brier1950verification",
        title="Verification of Forecasts Expressed in Terms of Probability",
        author="Brier, Glenn W.",
        journal="Monthly Weather Review",
        volume="78",
        number="1",
        pages="1--3",
        year="1950",
    ),
    "ghosh2022adafocal": _entry(
        "inproceedings",
        "ghosh2022adafocal",
        title="{AdaFocal}: Calibration-aware Adaptive Focal Loss",
        author="Ghosh, Arindam and Schaaf, Thomas and Gormley, Matthew",
        booktitle=_NEURIPS,
        volume="35",
        year="2022",
    ),
    "guo2017calibration": _entry(
        "inproceedings",
        "guo2017calibration",
        title="On Calibration of Modern Neural Networks",
        author="Guo, Chuan and Pleiss, Geoff and Sun, Yu and Weinberger, Kilian Q.",
        booktitle=_ICML,
        pages="1321--1330",
        year="2017",
    ),
    "gupta2021calibration": _entry(
        "inproceedings",
        "gupta2021calibration",
        title="Calibration of Neural Networks using Splines",
        author="Gupta, Kartik and Rahimi, Amir and Ajanthan, Thalaiyasingam and Mensink, Thomas and "
        "Sminchisescu, Cristian and Hartley, Richard",
        booktitle="International Conference on Learning Representations",
        year="2021",
    ),
    "hebbalaguppe2022stitch": _entry(
        "inproceedings",
        "hebbalaguppe2022stitch",
        title="A Stitch in Time Saves Nine: A Train-Time Regularizing Loss for Improved Neural Network Calibration",
        author="Hebbalaguppe, Ramya and Prakash, Jatin and Madan, Neelabh and Arora, Chetan",
        booktitle=_CVPR,
        year="2022",
    ),
    "karandikar2021soft": _entry(
        "inproceedings",
        "karandikar2021soft",
        title="Soft Calibration Objectives for Neural Networks",
        author="Karandikar, Archit and Cain, Nicholas and Tran, Dustin and Lakshminarayanan, Balaji and "
        "Shlens, Jonathon and Mozer, Michael C. and Roelofs, Becca",
        booktitle=_NEURIPS,
        volume="34",
        pages="29768--29779",
        year="2021",
    ),
    "krishnan2020improving": _entry(
        "inproceedings",
        "krishnan2020improving",
        title="Improving Model Calibration with Accuracy versus Uncertainty Optimization",
        author="Krishnan, Ranganath and Tickoo, Omesh",
        booktitle=_NEURIPS,
        volume="33",
        year="2020",
    ),
    "kull2019beyond": _entry(
        "inproceedings",
        "kull2019beyond",
        title="Beyond Temperature Scaling: Obtaining Well-Calibrated Multi-Class Probabilities with {Dirichlet} "
        "Calibration",
        author=r"Kull, Meelis and Perello Nieto, Miquel and K{\"a}ngsepp, Markus and Silva Filho, Telmo and "
        "Song, Hao and Flach, Peter",
        booktitle=_NEURIPS,
        volume="32",
        year="2019",
    ),
    "kumar2018trainable": _entry(
        "inproceedings",
        "kumar2018trainable",
        title="Trainable Calibration Measures for Neural Networks from Kernel Mean Embeddings",
        author="Kumar, Aviral and Sarawagi, Sunita and Jain, Ujjwal",
        booktitle=_ICML,
        pages="2805--2814",
        year="2018",
    ),
    "li2025beyond": _entry(
        "misc",
        "li2025beyond",
        title="Beyond Log Likelihood: Probability-Based Objectives for Supervised Fine-Tuning across the Model "
        "Capability Continuum",
        author="Li, Gaotang and Qiu, Ruizhong and Chen, Xiusi and Ji, Heng and Tong, Hanghang",
        year="2025",
        eprint="2510.00526",
        archivePrefix="arXiv",
    ),
    "liang2024towards": _entry(
        "misc",
        "liang2024towards",
        title="Towards Trustworthy Deep Neural Network through {Euclidean} Distance",
        author="Liang, Wenhao and Dong, Chang and Zheng, Liangwei Nathan and Zhang, Wei Emma and Chen, Weitong",
        year="2024",
        eprint="2410.18321",
        archivePrefix="arXiv",
    ),
    "lin2017focal": _entry(
        "inproceedings",
        "lin2017focal",
        title="Focal Loss for Dense Object Detection",
        author=r"Lin, Tsung-Yi and Goyal, Priya and Girshick, Ross and He, Kaiming and Doll{\'a}r, Piotr",
        booktitle="IEEE International Conference on Computer Vision",
        pages="2980--2988",
        year="2017",
    ),
    "lin2025uncertainty": _entry(
        "inproceedings",
        "lin2025uncertainty",
        title="Uncertainty Weighted Gradients for Model Calibration",
        author="Lin, Jinxu and Tao, Linwei and Dong, Minjing and Xu, Chang",
        booktitle=_CVPR,
        pages="15497--15507",
        year="2025",
    ),
    "liu2022devil": _entry(
        "inproceedings",
        "liu2022devil",
        title="The Devil is in the Margin: Margin-based Label Smoothing for Network Calibration",
        author="Liu, Bingyuan and Ben Ayed, Ismail and Galdran, Adrian and Dolz, Jose",
        booktitle=_CVPR,
        year="2022",
    ),
    "mukhoti2020calibrating": _entry(
        "inproceedings",
        "mukhoti2020calibrating",
        title="Calibrating Deep Neural Networks using Focal Loss",
        author="Mukhoti, Jishnu and Kulharia, Viveka and Sanyal, Amartya and Golodetz, Stuart and Torr, Philip "
        "and Dokania, Puneet",
        booktitle=_NEURIPS,
        volume="33",
        pages="15288--15299",
        year="2020",
    ),
    "pereyra2017regularizing": _entry(
        "misc",
        "pereyra2017regularizing",
        title="Regularizing Neural Networks by Penalizing Confident Output Distributions",
        author=r"Pereyra, Gabriel and Tucker, George and Chorowski, Jan and Kaiser, {\L}ukasz and Hinton, Geoffrey",
        year="2017",
        eprint="1701.06548",
        archivePrefix="arXiv",
    ),
    "popordanoska2022consistent": _entry(
        "inproceedings",
        "popordanoska2022consistent",
        title="A Consistent and Differentiable {Lp} Canonical Calibration Error Estimator",
        author="Popordanoska, Teodora and Sayer, Raphael and Blaschko, Matthew B.",
        booktitle=_NEURIPS,
        volume="35",
        pages="7933--7946",
        year="2022",
    ),
    "saerens2002adjusting": _entry(
        "article",
        "saerens2002adjusting",
        title="Adjusting the Outputs of a Classifier to New a Priori Probabilities: A Simple Procedure",
        author="Saerens, Marco and Latinne, Patrice and Decaestecker, Christine",
        journal="Neural Computation",
        volume="14",
        number="1",
        pages="21--41",
        year="2002",
    ),
    "szegedy2016rethinking": _entry(
        "inproceedings",
        "szegedy2016rethinking",
        title="Rethinking the {Inception} Architecture for Computer Vision",
        author="Szegedy, Christian and Vanhoucke, Vincent and Ioffe, Sergey and Shlens, Jonathon and Wojna, Zbigniew",
        booktitle="IEEE Conference on Computer Vision and Pattern Recognition",
        pages="2818--2826",
        year="2016",
    ),
    "tao2023dual": _entry(
        "inproceedings",
        "tao2023dual",
        title="Dual Focal Loss for Calibration",
        author="Tao, Linwei and Dong, Minjing and Xu, Chang",
        booktitle=_ICML,
        pages="33833--33849",
        year="2023",
    ),
    "wang2021rethinking": _entry(
        "inproceedings",
        "wang2021rethinking",
        title="Rethinking Calibration of Deep Neural Networks: Do Not Be Afraid of Overconfidence",
        author="Wang, Deng-Bao and Feng, Lei and Zhang, Min-Ling",
        booktitle=_NEURIPS,
        volume="34",
        pages="11809--11820",
        year="2021",
    ),
    "wu2025generalization": _entry(
        "misc",
        "wu2025generalization",
        title="On the Generalization of {SFT}: A Reinforcement Learning Perspective with Reward Rectification",
        author="Wu, Yongliang and Zhou, Yizhou and Ziheng, Zhou and Peng, Yingzhe and Ye, Xinyu and Hu, Xinting and "
        "Zhu, Wenbo and Qi, Lu and Yang, Ming-Hsuan and Yang, Xu",
        year="2025",
        eprint="2508.05629",
        archivePrefix="arXiv",
    ),
    "zadrozny2001obtaining": _entry(
        "inproceedings",
        "zadrozny2001obtaining",
        title="Obtaining Calibrated Probability Estimates from Decision Trees and Naive {Bayesian} Classifiers",
        author="Zadrozny, Bianca and Elkan, Charles",
        booktitle=_ICML,
        pages="609--616",
        year="2001",
    ),
    "zadrozny2002transforming": _entry(
        "inproceedings",
        "zadrozny2002transforming",
        title="Transforming Classifier Scores into Accurate Multiclass Probability Estimates",
        author="Zadrozny, Bianca and Elkan, Charles",
        booktitle="ACM SIGKDD International Conference on Knowledge Discovery and Data Mining",
        pages="694--699",
        year="2002",
    ),
    "zhang2018generalized": _entry(
        "inproceedings",
        "zhang2018generalized",
        title="Generalized Cross Entropy Loss for Training Deep Neural Networks with Noisy Labels",
        author="Zhang, Zhilu and Sabuncu, Mert R.",
        booktitle=_NEURIPS,
        volume="31",
        year="2018",
    ),
    "zhang2020mix": _entry(
        "inproceedings",
        "zhang2020mix",
        title="{Mix-n-Match}: Ensemble and Compositional Methods for Uncertainty Calibration in Deep Learning",
        author="Zhang, Jize and Kailkhura, Bhavya and Han, T. Yong-Jin",
        booktitle=_ICML,
        pages="11117--11128",
        year="2020",
    ),
}

# Cross entropy has no source, and the study that `logit_norm` is from has no author in print.
OF_LOSSES: dict[str, tuple[str, ...]] = {
    "label_smoothing": ("szegedy2016rethinking",),
    "brier": ("brier1950verification",),
    "focal": ("lin2017focal", "mukhoti2020calibrating"),
    "focal_gra": ("lin2025uncertainty",),
    "flsd": ("mukhoti2020calibrating",),
    "flsd_gra": ("lin2025uncertainty",),
    "inverse_focal": ("wang2021rethinking",),
    "dual_focal": ("tao2023dual",),
    "dual_focal_gra": ("lin2025uncertainty",),
    "bsce": ("lin2025uncertainty",),
    "bsce_gra": ("lin2025uncertainty",),
    "ece_ce": ("lin2025uncertainty",),
    "focal_calibration": ("liang2024towards",),
    "adafocal": ("ghosh2022adafocal",),
    "ada_dual_focal": ("tao2023dual", "ghosh2022adafocal"),
    "calfocal": ("ghosh2022adafocal",),
    "entropy_regularized": ("pereyra2017regularizing",),
    "mmce": ("kumar2018trainable",),
    "soft_ece": ("karandikar2021soft", "bohdal2021meta"),
    "kde_ece": ("popordanoska2022consistent", "tao2023dual"),
    "mbls": ("liu2022devil",),
    "dft": ("wu2025generalization",),
    "power": ("li2025beyond", "zhang2018generalized"),
    "mdca": ("hebbalaguppe2022stitch",),
    "avuc": ("krishnan2020improving",),
}
OF_MAPS: dict[str, tuple[str, ...]] = {
    "temperature": ("guo2017calibration",),
    "per_label_temperature": ("guo2017calibration",),
    "vector": ("guo2017calibration",),
    "matrix": ("guo2017calibration", "kull2019beyond"),
    "structured_vector": ("berta2025structured",),
    "structured_matrix": ("berta2025structured",),
    "auto": ("guo2017calibration", "berta2025structured"),
    "prior_correction": ("saerens2002adjusting",),
    "dirichlet": ("kull2019beyond",),
    "ensemble_temperature": ("zhang2020mix",),
    "histogram": ("zadrozny2001obtaining",),
    "isotonic": ("zadrozny2002transforming", "zhang2020mix"),
    "grouped": ("berta2025structured",),
    "spline": ("gupta2021calibration",),
}


def citations(loss: str | None, method: str | None) -> list[str]:
    """The BibTeX entries for a loss and a map by their names, each once; none for names without a source.

    >>> [entry.splitlines()[0] for entry in citations("focal", "temperature")]
    ['@inproceedings{lin2017focal,', '@inproceedings{mukhoti2020calibrating,', '@inproceedings{guo2017calibration,']
    """
    keys = dict.fromkeys((*OF_LOSSES.get(loss or "", ()), *OF_MAPS.get(method or "", ())))
    return [ENTRIES[key] for key in keys]
